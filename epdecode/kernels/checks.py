"""Refusals shared by the launchers: what is wrong, where, what came, what is accepted."""

from __future__ import annotations

import torch

from epdecode.errors import ConfigError
from epdecode.kernels.fp8 import scale_dtype


def check(good: bool, op: str, what: str, got: object, accepted: str) -> None:
    """Raise ConfigError unless ``good``."""
    if not good:
        raise ConfigError(f"{op}: {what} is {got}; accepted: {accepted}")


def check_counts(op: str, counts: torch.Tensor, rows: torch.Tensor) -> None:
    """Per-expert counts: int32 [E], contiguous, on the rows' device."""
    check(counts.dtype == torch.int32, op, "counts' dtype", counts.dtype, "int32")
    check(counts.device == rows.device, op, "counts' device", counts.device, str(rows.device))
    experts = rows.shape[0] if rows.dim() == 3 else counts.numel()
    check(tuple(counts.shape) == (experts,), op, "counts' shape", tuple(counts.shape), "[E]")
    check(counts.is_contiguous(), op, "counts' stride", counts.stride(), "contiguous")


def check_scales(op: str, scales: torch.Tensor, shape: tuple[int, ...], scale_format: str) -> None:
    """A scale tensor: right type and shape, any strides."""
    dtype = scale_dtype(scale_format)
    check(scales.dtype == dtype, op, "the scales' dtype", scales.dtype, f"{dtype} ({scale_format})")
    check(tuple(scales.shape) == shape, op, "the scales' shape", tuple(scales.shape), str(shape))
