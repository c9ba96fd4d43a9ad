"""Masked grouped GEMMs of the expert chain for few rows per expert: weights are the left operand.

A tile is ``rows`` weight rows times ``tokens`` rows of one expert. A fixed number of programs walks
the tiles of experts that received rows; counts are read on the device, so nothing syncs and a
captured graph serves every load. Runs on any GPU Triton has FP8 for, and in its interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from epdecode.batch import Fp8Rows
from epdecode.kernels.launch import persistent_programs, power_of_two
from epdecode.kernels.quant_math import group_scale, silu_mul

GROUP = 128
"""Columns that share one scale; also the K step: scales are applied once per step in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one grouped GEMM is cut and run."""

    rows: int = 128
    """Weight rows of a tile; of gate and of up each in the fused GEMM, where it must be 128."""
    tokens: int = 16
    """Token rows of a tile: from 16, a power of two. Weights are read once per such tile."""
    stages: int = 4
    warps: int = 4
    programs_per_sm: int = 2


@triton.jit
def _tile_ends(counts, E: tl.constexpr, E_POW2: tl.constexpr, COLUMNS, TOKENS: tl.constexpr):
    """Running total of tiles after each expert, int32 [E_POW2]."""
    experts = tl.arange(0, E_POW2)
    rows = tl.load(counts + experts, mask=experts < E, other=0)
    return tl.cumsum((rows + TOKENS - 1) // TOKENS * COLUMNS, 0)


@triton.jit
def _locate(tile, ends):
    """The expert a tile belongs to, and the tile's index within it."""
    before = ends <= tile
    return tl.sum(before.to(tl.int32), 0), tile - tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def _scales_of(scales, group, rows, valid, stride_m, stride_g, UE8M0: tl.constexpr):
    """Scales of ``rows`` for one group, float32 [tokens], unpacked when they are exponents."""
    if UE8M0:
        words = tl.load(scales + rows * stride_m + (group // 4) * stride_g, mask=valid, other=0)
        return (((words >> (8 * (group % 4))) & 0xFF) << 23).to(tl.float32, bitcast=True)
    return tl.load(scales + rows * stride_m + group * stride_g, mask=valid, other=0.0)


@triton.jit
def _gate_up_kernel(
    x, w, x_scales, w_scales, counts, act, act_scales,
    x_stride_e, x_stride_m, x_stride_g, a_stride_e, a_stride_m, a_stride_g,
    E: tl.constexpr, E_POW2: tl.constexpr, M: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    TOKENS: tl.constexpr, STEP: tl.constexpr, FP8: tl.constexpr, UE8M0: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = I // 128
    ends = _tile_ends(counts, E, E_POW2, columns, TOKENS)
    tiles = tl.max(ends, 0)
    tile = tl.program_id(0)
    while tile < tiles:
        expert, index = _locate(tile, ends)
        token_tiles = (tl.load(counts + expert) + TOKENS - 1) // TOKENS
        column = index // token_tiles
        first = index % token_tiles * TOKENS
        tokens = first + tl.arange(0, TOKENS)
        valid = tokens < tl.load(counts + expert)
        gate_row = expert * (2 * I) + column * 128
        up_row = gate_row + I
        x_row = expert * M + first
        gate = tl.zeros((128, TOKENS), tl.float32)
        up = tl.zeros((128, TOKENS), tl.float32)
        if FP8:
            scales = x_scales + expert.to(tl.int64) * x_stride_e
            gate_scales = w_scales + (gate_row // 128) * (H // 128)
            up_scales = w_scales + (up_row // 128) * (H // 128)
        for step in tl.range(0, H // STEP, num_stages=STAGES):
            rows = x.load([x_row, step * STEP]).T
            if FP8:
                x_scale = _scales_of(scales, step, tokens, valid, x_stride_m, x_stride_g, UE8M0)
                gate_scale = tl.load(gate_scales + step)
                up_scale = tl.load(up_scales + step)
                gate += tl.dot(w.load([gate_row, step * STEP]), rows) * (x_scale * gate_scale)[None]
                up += tl.dot(w.load([up_row, step * STEP]), rows) * (x_scale * up_scale)[None]
            else:
                gate = tl.dot(w.load([gate_row, step * STEP]), rows, gate)
                up = tl.dot(w.load([up_row, step * STEP]), rows, up)
        values = silu_mul(gate, up)
        rows64 = expert.to(tl.int64) * M + tokens
        place = rows64[:, None] * I + (column * 128 + tl.arange(0, 128))[None]
        if FP8:
            scale, factor = group_scale(tl.max(tl.abs(values), 0), UE8M0)
            if UE8M0:
                scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            values = tl.clamp(
                values * factor[None], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL
            )
            at = expert.to(tl.int64) * a_stride_e + tokens * a_stride_m + column * a_stride_g
            tl.store(act_scales + at, scale, mask=valid)
        tl.store(act + place, values.to(act.dtype.element_ty).T, mask=valid[:, None])
        tile += tl.num_programs(0)


@triton.jit
def _down_kernel(
    x, w, x_scales, w_scales, counts, out,
    x_stride_e, x_stride_m, x_stride_g,
    E: tl.constexpr, E_POW2: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, FP8: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = N // ROWS
    ends = _tile_ends(counts, E, E_POW2, columns, TOKENS)
    tiles = tl.max(ends, 0)
    tile = tl.program_id(0)
    while tile < tiles:
        expert, index = _locate(tile, ends)
        token_tiles = (tl.load(counts + expert) + TOKENS - 1) // TOKENS
        column = index // token_tiles
        first = index % token_tiles * TOKENS
        tokens = first + tl.arange(0, TOKENS)
        valid = tokens < tl.load(counts + expert)
        w_row = expert * N + column * ROWS
        x_row = expert * M + first
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        if FP8:
            scales = x_scales + expert.to(tl.int64) * x_stride_e
            block_scales = w_scales + (w_row // 128) * (K // 128)
        for step in tl.range(0, K // STEP, num_stages=STAGES):
            weights = w.load([w_row, step * STEP])
            rows = x.load([x_row, step * STEP]).T
            if FP8:
                x_scale = _scales_of(scales, step, tokens, valid, x_stride_m, x_stride_g, False)
                acc += tl.dot(weights, rows) * (x_scale * tl.load(block_scales + step))[None]
            else:
                acc = tl.dot(weights, rows, acc)
        place = (expert.to(tl.int64) * M + tokens)[:, None] * N
        place += (column * ROWS + tl.arange(0, ROWS))[None]
        tl.store(out + place, acc.to(out.dtype.element_ty).T, mask=valid[:, None])
        tile += tl.num_programs(0)


def _described(rows: torch.Tensor, block_rows: int, step: int) -> TensorDescriptor:
    """``rows`` [..., K] as one tall matrix for tiles of block_rows x step."""
    return TensorDescriptor.from_tensor(rows.view(-1, rows.shape[-1]), [block_rows, step])


def _split(rows: torch.Tensor | Fp8Rows) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Data, scales (the data again for bfloat16, never read) and whether it is FP8."""
    if isinstance(rows, Fp8Rows):
        return rows.data, rows.scales, True
    return rows, rows, False


def gate_up_swiglu(
    x: torch.Tensor | Fp8Rows,
    gate_up: torch.Tensor | Fp8Rows,
    counts: torch.Tensor,
    act: torch.Tensor | Fp8Rows,
    tile: Tile,
) -> None:
    """act[e, :counts[e]] = silu(x gate^T) * (x up^T), in act's format; the rest of act is untouched.

    x: [E, M, H]; gate_up: [E, 2I, H], gate rows first; counts: int32 [E]; act: [E, M, I]. All FP8
    (weights with float32 scales [E, 2I/128, H/128], rows with scales of any strides) or all
    bfloat16. int32 x scales are packed exponents; act's scales are then powers of two in float32.
    """
    x_data, x_scales, fp8 = _split(x)
    w_data, w_scales, _ = _split(gate_up)
    a_data, a_scales, _ = _split(act)
    experts, capacity, hidden = x_data.shape
    step = GROUP if fp8 else GROUP // 2
    tiles = experts * -(-capacity // tile.tokens) * (a_data.shape[-1] // 128)
    _gate_up_kernel[(persistent_programs(x_data.device, tile.programs_per_sm, tiles),)](
        _described(x_data, tile.tokens, step), _described(w_data, 128, step),
        x_scales, w_scales, counts, a_data, a_scales,
        *x_scales.stride(), *a_scales.stride(),
        E=experts, E_POW2=power_of_two(experts), M=capacity, H=hidden,
        I=a_data.shape[-1], TOKENS=tile.tokens, STEP=step, FP8=fp8,
        UE8M0=x_scales.dtype == torch.int32, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def down(
    act: torch.Tensor | Fp8Rows,
    weights: torch.Tensor | Fp8Rows,
    counts: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
) -> None:
    """out[e, :counts[e]] = act weights^T, bfloat16 [E, M, H]; rows past the count are untouched.

    act: [E, M, I] and weights: [E, H, I], both FP8 with float32 scales or both bfloat16.
    """
    a_data, a_scales, fp8 = _split(act)
    w_data, w_scales, _ = _split(weights)
    experts, capacity, size = a_data.shape
    step = GROUP if fp8 else GROUP // 2
    tiles = experts * -(-capacity // tile.tokens) * (out.shape[-1] // tile.rows)
    _down_kernel[(persistent_programs(a_data.device, tile.programs_per_sm, tiles),)](
        _described(a_data, tile.tokens, step), _described(w_data, tile.rows, step),
        a_scales, w_scales, counts, out, *a_scales.stride(),
        E=experts, E_POW2=power_of_two(experts), M=capacity, N=out.shape[-1], K=size,
        ROWS=tile.rows, TOKENS=tile.tokens, STEP=step, FP8=fp8, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
