"""Quantise the rows that experts received and no others: a bfloat16 wire in front of FP8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epdecode.batch import Fp8Rows
from epdecode.kernels.fp8 import quantize_ref
from epdecode.kernels.grouped_gemm import locate, tile_ends
from epdecode.kernels.launch import persistent_programs, power_of_two
from epdecode.kernels.quant_math import quantize_groups

ROWS = 16
"""Rows of one piece of work; its scales are then 64 contiguous bytes."""


@triton.jit
def _quantize_rows_kernel(
    x, counts, data, scales, stride_e, stride_m, stride_g,
    E: tl.constexpr, EXPERTS: tl.constexpr, M: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    ends = tile_ends(counts, E, EXPERTS, H // 128, ROWS)
    tiles = tl.max(ends, 0)
    tile = tl.program_id(0)
    while tile < tiles:
        expert, group, first, count = locate(tile, ends, counts, ROWS)
        expert = expert.to(tl.int64)
        row = first + tl.arange(0, ROWS)
        valid = row < count
        place = (expert * M + row)[:, None] * H + group * 128 + tl.arange(0, 128)[None]
        values = tl.load(x + place, mask=valid[:, None], other=0.0).to(tl.float32)
        values, scale = quantize_groups(values, False)
        tl.store(data + place, values, mask=valid[:, None])
        at = expert * stride_e + row * stride_m + group * stride_g
        tl.store(scales + at, scale, mask=valid)
        tile += tl.num_programs(0)


def quantize_rows(x: torch.Tensor, counts: torch.Tensor, out: Fp8Rows) -> Fp8Rows:
    """x bfloat16 [E, M, H], counts int32 [E] -> ``out``: e4m3 [E, M, H] and float32 scales.

    Scales [E, M, H/128] of any strides. Rows past the count are neither read nor written.
    """
    experts, capacity, hidden = x.shape
    tiles = experts * -(-capacity // ROWS) * (hidden // 128)
    _quantize_rows_kernel[(persistent_programs(x.device, 8, tiles),)](
        x, counts, out.data, out.scales, *out.scales.stride(),
        E=experts, EXPERTS=power_of_two(experts), M=capacity, H=hidden, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return out


def quantize_rows_ref(x: torch.Tensor, counts: torch.Tensor, out: Fp8Rows) -> Fp8Rows:
    """``quantize_rows`` in plain torch; synchronises with the host."""
    for expert, count in enumerate(counts.tolist()):
        rows = quantize_ref(x[expert, :count])
        out.data[expert, :count] = rows.data
        out.scales[expert, :count] = rows.scales
    return out
