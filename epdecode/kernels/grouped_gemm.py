"""Masked grouped GEMMs of the expert chain for few rows per expert: weights are the left operand.

A tile is 64 or 128 weight rows times ``tokens`` rows of one expert. A fixed number of programs
walks the tiles of experts that received rows; counts are read on the device, so nothing syncs and
a captured graph serves every load. Runs on any GPU Triton has FP8 for, and in its interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from epdecode.batch import Fp8Rows, Rows
from epdecode.kernels.dot import dot_bfloat16
from epdecode.kernels.launch import persistent_programs, power_of_two
from epdecode.kernels.quant_math import group_scale, silu_mul

GROUP = 128
"""Columns that share one scale; also the FP8 K step, so scales are applied once a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one grouped GEMM is cut and run."""

    rows: int = 128
    """Weight rows of a tile, 64 or 128; of gate and of up each in gate_up_swiglu, always 128."""
    tokens: int = 16
    """Token rows of a tile, a power of two from 16. Weights are read once per such tile."""
    stages: int = 4
    warps: int = 4
    programs_per_sm: int = 2


@triton.jit
def tile_ends(
    counts, E: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS, TOKENS: tl.constexpr
) -> tl.tensor:
    """Running total of tiles after each expert, int32 [EXPERTS]."""
    experts = tl.arange(0, EXPERTS)
    rows = tl.load(counts + experts, mask=experts < E, other=0)
    return tl.cumsum((rows + TOKENS - 1) // TOKENS * COLUMNS, 0)


@triton.jit
def locate(
    tile, ends, counts, TOKENS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(expert, column, first token, rows of the expert) of a tile; tokens run fastest."""
    before = ends <= tile
    expert = tl.sum(before.to(tl.int32), 0)
    index = tile - tl.max(tl.where(before, ends, 0), 0)
    count = tl.load(counts + expert)
    token_tiles = (count + TOKENS - 1) // TOKENS
    return expert, index // token_tiles, index % token_tiles * TOKENS, count


@triton.jit
def _row_scales(scales, group, rows, valid, stride_m, stride_g, UE8M0: tl.constexpr):
    """Scales of ``rows`` for one group, float32 [tokens], unpacked when they are exponents."""
    if UE8M0:
        words = tl.load(scales + rows * stride_m + (group // 4) * stride_g, mask=valid, other=0)
        return (((words >> (8 * (group % 4))) & 0xFF) << 23).to(tl.float32, bitcast=True)
    else:  # noqa: RET505, the compiler must not see both returns
        return tl.load(scales + rows * stride_m + group * stride_g, mask=valid, other=0.0)


@triton.jit
def _gate_up_kernel(
    x, w, x_scales, w_scales, counts, act, act_scales,
    x_stride_e, x_stride_m, x_stride_g, a_stride_e, a_stride_m, a_stride_g,
    E: tl.constexpr, EXPERTS: tl.constexpr, M: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr, STEP: tl.constexpr, FP8: tl.constexpr, UE8M0: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = SIZE // 128
    ends = tile_ends(counts, E, EXPERTS, COLUMNS, TOKENS)
    tiles = tl.max(ends, 0)
    tile = tl.program_id(0)
    while tile < tiles:
        expert, column, first, count = locate(tile, ends, counts, TOKENS)
        tokens = first + tl.arange(0, TOKENS)
        valid = tokens < count
        gate_row = expert * (2 * SIZE) + column * 128
        x_row = expert * M + first
        gate = tl.zeros((128, TOKENS), tl.float32)
        up = tl.zeros((128, TOKENS), tl.float32)
        scales = x_scales + expert.to(tl.int64) * x_stride_e
        gate_scales = w_scales + (expert * (2 * COLUMNS) + column) * (H // 128)
        up_scales = gate_scales + COLUMNS * (H // 128)
        for step in tl.range(0, H // STEP, num_stages=STAGES):
            rows = x.load([x_row, step * STEP]).T
            gate_w = w.load([gate_row, step * STEP])
            up_w = w.load([gate_row + SIZE, step * STEP])
            if FP8:
                scale = _row_scales(scales, step, tokens, valid, x_stride_m, x_stride_g, UE8M0)
                gate += tl.dot(gate_w, rows) * (scale * tl.load(gate_scales + step))[None]
                up += tl.dot(up_w, rows) * (scale * tl.load(up_scales + step))[None]
            else:
                gate = dot_bfloat16(gate_w, rows, gate, WIDEN)
                up = dot_bfloat16(up_w, rows, up, WIDEN)
        values = silu_mul(gate, up)
        if FP8:
            scale, factor = group_scale(tl.max(tl.abs(values), 0), UE8M0)
            if UE8M0:
                scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            values *= factor[None]
            values = tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            at = expert.to(tl.int64) * a_stride_e + tokens * a_stride_m + column * a_stride_g
            tl.store(act_scales + at, scale, mask=valid)
        place = (expert.to(tl.int64) * M + tokens)[:, None] * SIZE
        place += column * 128 + tl.arange(0, 128)[None]
        tl.store(act + place, values.to(act.dtype.element_ty).T, mask=valid[:, None])
        tile += tl.num_programs(0)


@triton.jit
def _down_kernel(
    x, w, x_scales, w_scales, counts, out, x_stride_e, x_stride_m, x_stride_g,
    E: tl.constexpr, EXPERTS: tl.constexpr, M: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, FP8: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = H // ROWS
    ends = tile_ends(counts, E, EXPERTS, COLUMNS, TOKENS)
    tiles = tl.max(ends, 0)
    tile = tl.program_id(0)
    while tile < tiles:
        expert, column, first, count = locate(tile, ends, counts, TOKENS)
        tokens = first + tl.arange(0, TOKENS)
        valid = tokens < count
        w_row = expert * H + column * ROWS
        x_row = expert * M + first
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        scales = x_scales + expert.to(tl.int64) * x_stride_e
        block_scales = w_scales + (w_row // 128) * (SIZE // 128)
        for step in tl.range(0, SIZE // STEP, num_stages=STAGES):
            weights = w.load([w_row, step * STEP])
            rows = x.load([x_row, step * STEP]).T
            if FP8:
                scale = _row_scales(scales, step, tokens, valid, x_stride_m, x_stride_g, False)
                acc += tl.dot(weights, rows) * (scale * tl.load(block_scales + step))[None]
            else:
                acc = dot_bfloat16(weights, rows, acc, WIDEN)
        place = (expert.to(tl.int64) * M + tokens)[:, None] * H
        place += column * ROWS + tl.arange(0, ROWS)[None]
        tl.store(out + place, acc.to(out.dtype.element_ty).T, mask=valid[:, None])
        tile += tl.num_programs(0)


def _boxes(rows: torch.Tensor, box_rows: int, step: int) -> TensorDescriptor:
    """``rows`` [..., K] as one tall matrix, loaded in boxes of box_rows x step."""
    return TensorDescriptor.from_tensor(rows.view(-1, rows.shape[-1]), [box_rows, step])


def _split(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Data, scales (for bfloat16 the data again, never read) and whether it is FP8."""
    if isinstance(rows, Fp8Rows):
        return rows.data, rows.scales, True
    return rows, rows, False


def gate_up_swiglu(x: Rows, gate_up: Rows, counts: torch.Tensor, act: Rows, tile: Tile) -> None:
    """act[e, :counts[e]] = silu(x gate^T) * (x up^T), quantised if FP8; the rest is untouched.

    x: [E, M, H]; gate_up: [E, 2I, H], gate rows first; counts: int32 [E]; act: [E, M, I]. All FP8
    (weights with float32 scales [E, 2I/128, H/128], rows with scales of any strides) or all
    bfloat16. int32 x scales are packed exponents; act's scales are then float32 powers of two.
    """
    x_data, x_scales, fp8 = _split(x)
    w_data, w_scales, _ = _split(gate_up)
    a_data, a_scales, _ = _split(act)
    experts, capacity, hidden = x_data.shape
    step = GROUP if fp8 else GROUP // 2
    tiles = experts * -(-capacity // tile.tokens) * (a_data.shape[-1] // 128)
    _gate_up_kernel[(persistent_programs(x_data.device, tile.programs_per_sm, tiles),)](
        _boxes(x_data, tile.tokens, step), _boxes(w_data, 128, step),
        x_scales, w_scales, counts, a_data, a_scales,
        *x_scales.stride(), *a_scales.stride(),
        E=experts, EXPERTS=power_of_two(experts), M=capacity, H=hidden, SIZE=a_data.shape[-1],
        TOKENS=tile.tokens, STEP=step, FP8=fp8, UE8M0=x_scales.dtype == torch.int32,
        STAGES=tile.stages, WIDEN=x_data.device.type != "cuda", num_warps=tile.warps,
    )  # fmt: skip


def down(act: Rows, weights: Rows, counts: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
    """out[e, :counts[e]] = act weights^T, bfloat16 [E, M, H]; rows past the count are untouched.

    act: [E, M, I] and weights: [E, H, I], both FP8 with float32 scales or both bfloat16.
    """
    a_data, a_scales, fp8 = _split(act)
    w_data, w_scales, _ = _split(weights)
    experts, capacity, size = a_data.shape
    step = GROUP if fp8 else GROUP // 2
    tiles = experts * -(-capacity // tile.tokens) * (out.shape[-1] // tile.rows)
    _down_kernel[(persistent_programs(a_data.device, tile.programs_per_sm, tiles),)](
        _boxes(a_data, tile.tokens, step), _boxes(w_data, tile.rows, step),
        a_scales, w_scales, counts, out, *a_scales.stride(),
        E=experts, EXPERTS=power_of_two(experts), M=capacity, H=out.shape[-1], SIZE=size,
        ROWS=tile.rows, TOKENS=tile.tokens, STEP=step, FP8=fp8, STAGES=tile.stages,
        WIDEN=a_data.device.type != "cuda", num_warps=tile.warps,
    )  # fmt: skip
