"""A stand-in for deep_gemm's contiguous grouped FP8 GEMM in plain torch.

Polices what the real one takes for granted: MN-major scales, blocks that begin at the alignment,
an output that overlaps no input. Rows outside the blocks become NaN, as if never written well.
"""

from __future__ import annotations

import sys

import torch

from epdecode.batch import Fp8Rows
from epdecode.kernels.fp8 import dequantize, dequantize_block
from tests.fakes.deep_ep import require

DEFAULT_ALIGNMENT = 128
_alignment = [DEFAULT_ALIGNMENT]

Pair = tuple[torch.Tensor, torch.Tensor]


def module() -> object:
    """This module, with the library's default alignment, to be put where deep_gemm is sought."""
    _alignment[0] = DEFAULT_ALIGNMENT
    return sys.modules[__name__]


def get_m_alignment_for_contiguous_layout() -> int:
    return _alignment[0]


def set_mk_alignment_for_contiguous_layout(rows: int) -> None:
    _alignment[0] = rows


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    require(use_psum_layout, "only the prefix-sum layout is doubled")
    require(expected_m_for_psum_layout is None or expected_m_for_psum_layout > 0, "a hint above 0")
    require(grouped_layout.dtype == torch.int32, "grouped_layout is int32")
    require(grouped_layout.shape == (b[0].shape[0],), "an end per group")
    require(d.dtype == torch.bfloat16 and d.is_contiguous(), "d is dense bfloat16")
    require(d.shape == (a[0].shape[0], b[0].shape[1]), "d [M, N]")
    require(a[0].is_contiguous() and a[0].dtype == torch.float8_e4m3fn, "a is dense e4m3")
    require(a[1].stride(0) == 1 and a[1].stride(1) % 4 == 0, "scales MN-major, aligned to 16 bytes")
    for tensor in a:
        require(not _overlap(tensor, d), "d overlaps an input")
    out = torch.full(d.shape, torch.nan)
    start = 0
    for group, end in enumerate(grouped_layout.tolist()):
        require(start <= end <= d.shape[0], f"group {group} ends at {end}, begins at {start}")
        rows = dequantize(Fp8Rows(a[0][start:end], a[1][start:end]))
        out[start:end] = rows @ dequantize_block(Fp8Rows(b[0][group], b[1][group])).T
        start = -(-end // _alignment[0]) * _alignment[0]
    d.copy_(out)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = _span(one), _span(other)
    return first[0] < second[1] and second[0] < first[1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
