"""Tensors that take turns in one piece of memory."""

from __future__ import annotations

import math

import torch

from epdecode.batch import Fp8Rows
from epdecode.kernels.fp8 import num_groups, scale_dtype, scale_words


def carve(
    memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0
) -> torch.Tensor:
    """A contiguous tensor at byte ``start`` of memory (uint8)."""
    size = math.prod(shape) * dtype.itemsize
    return memory[start : start + size].view(dtype).view(shape)


def carve_quantised(memory: torch.Tensor, rows: int, size: int, scale_format: str) -> Fp8Rows:
    """e4m3 [rows, size] and behind it its scales, MN-major; rows a multiple of 4.

    Scales of rows that nobody writes hold whatever was there: they reach those rows alone.
    """
    data = carve(memory, (rows, size), torch.float8_e4m3fn)
    words = scale_words(num_groups(size), scale_format)
    scales = carve(memory, (words, rows), scale_dtype(scale_format), rows * size)
    return Fp8Rows(data, scales.T)
