"""The whole expert chain in one persistent kernel for Hopper: gate-up, SwiGLU, quantisation, down.

One program per SM. One warp streams weights without pause through a ring in shared memory, across
tiles and across the border between the two GEMMs; one loads rows; eight multiply. Down tiles wait,
rows only, until the activations of their expert are written. Tiles are taken from a counter in
order, so a program only ever waits for tiles that a running program already has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from epdecode.batch import ExpertWeights, Fp8Rows
from epdecode.kernels.expert_chain_load import (
    Cut,
    Ring,
    load_block_scales,
    load_rows,
    load_weights,
)
from epdecode.kernels.expert_chain_math import consume
from epdecode.kernels.fp8 import mn_major_scales
from epdecode.kernels.launch import persistent_programs, power_of_two


@gluon.jit
def _chain_kernel(
    x, x_scales, w1, act_rows, act_row_scales, w2, w1_scales, w2_scales, counts, tickets, ready,
    partials, given, busy, act, act_scales, out, w1_data, w2_data,
    E: gl.constexpr, E_POW2: gl.constexpr, M: gl.constexpr, H: gl.constexpr, SIZE: gl.constexpr,
    TOKENS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, NARROW: gl.constexpr,
    SPLIT: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr, UE8M0: gl.constexpr,
):  # fmt: skip
    cut = Cut(E, E_POW2, M, H, SIZE, TOKENS, PARTS, STAGES, NARROW, SPLIT, AHEAD)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = Ring(
        gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], w1.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES * cut.BOXES, TOKENS, 128], x.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES * cut.BOXES, 1, cut.LANES], x_scales.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int32, [4 * cut.SLOTS, 1], words),
        gl.allocate_shared_memory(gl.float32, [2 * cut.SLOTS, cut.BLOCKS], words),
        gl.allocate_shared_memory(gl.float32, [4, TOKENS], words),
        gl.allocate_shared_memory(gl.int64, [1], barrier),
        gl.allocate_shared_memory(gl.int64, [cut.SLOTS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [cut.SLOTS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [cut.SLOTS, 1], barrier),
    )
    mbarrier.init(ring.met, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(i), count=2)
        mbarrier.init(ring.empty.index(i), count=2)
    for i in gl.static_range(cut.SLOTS):
        mbarrier.init(ring.scaled.index(i), count=1)
        mbarrier.init(ring.posted.index(i), count=1)
        mbarrier.init(ring.taken.index(i), count=4)
    gl.warp_specialize(
        [
            (consume, (act, act_scales, ready, partials, given, busy, out, ring, cut, UE8M0, 0)),
            (consume, (act, act_scales, ready, partials, given, busy, out, ring, cut, UE8M0, 1)),
            (load_weights, (w1, w2, w1_data, w2_data, counts, tickets, ring, cut, PDL)),
            (load_rows, (x, x_scales, act_rows, act_row_scales, ready, ring, cut)),
            (load_block_scales, (w1_scales, w2_scales, ring, cut)),
        ],
        [4, 1, 1, 1],
        [232, 32, 32, 32],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTile:
    """How the fused chain is cut."""

    tokens: int = 16
    """Rows of one matrix product, 16 to 64."""
    parts: int = 1
    """Products of ``tokens`` rows per weight tile: 2 lets weights be read once for 2 x tokens."""
    stages: int = 6
    """Weight boxes of 32 KiB under way per SM."""
    narrow: bool = False
    """Down tiles of 128 instead of 256 weight rows, 256 columns a step: a shorter tail."""
    split: int = 1
    """Parts of K of a gate-up tile: 2 gives few experts enough tiles to fill the device."""
    ahead: int = 0
    pdl: bool = False


@dataclass(frozen=True, slots=True)
class ChainSpace:
    """Buffers one chain launch uses, shared by layers that run one after the other.

    act: e4m3 [E, M, I] with MN-major scales of strides (M * I/128, 1, M). The integers are zero
    before the first launch and after each: tickets [1]; ready [E * M/16], math groups done with
    a token tile; given [E * M/16, I/128, 3, 2], program + 1 that left a partial sum; busy
    [programs, 2], the program's place in partials is taken. partials: float32, [programs] places.
    """

    act: Fp8Rows
    tickets: torch.Tensor
    ready: torch.Tensor
    given: torch.Tensor
    busy: torch.Tensor
    partials: torch.Tensor


def empty_space(experts: int, capacity: int, size: int, device: torch.device) -> ChainSpace:
    """A space for any ChainTile; capacity a multiple of 4."""
    programs = persistent_programs(device, 1, 1 << 30)
    tiles = experts * -(-capacity // 16)

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    return ChainSpace(
        act=Fp8Rows(
            torch.empty(experts, capacity, size, dtype=torch.float8_e4m3fn, device=device),
            mn_major_scales(experts, capacity, size // 128, "fp32", device),
        ),
        tickets=zeros(1),
        ready=zeros(tiles),
        given=zeros(tiles * (size // 128) * 6),
        busy=zeros(2 * programs),
        partials=torch.empty(programs, 4 * 128 * 64, device=device),
    )


def _boxes(rows: torch.Tensor, box_rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat = rows.view(-1, rows.shape[-1])
    return TensorDescriptor.from_tensor(flat, [box_rows, 128], layout)


def _scale_boxes(scales: torch.Tensor, tokens: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    flat = scales.transpose(1, 2).view(-1, scales.shape[1])
    return TensorDescriptor.from_tensor(flat, [1, max(32, tokens)], layout)


def expert_chain(
    x: Fp8Rows,
    weights: ExpertWeights,
    counts: torch.Tensor,
    space: ChainSpace,
    out: torch.Tensor,
    tile: ChainTile,
) -> None:
    """out[e, :counts[e]] = down(silu(gate x) * up x), bfloat16 [E, M, H]; the rest is untouched.

    x: e4m3 [E, M, H] with MN-major float32 scales; weights: FP8 with 128x128 block scales.
    """
    experts, capacity, hidden = x.data.shape
    act = space.act
    grid = (persistent_programs(x.data.device, 1, 1 << 30),)
    _chain_kernel[grid](
        _boxes(x.data, tile.tokens), _scale_boxes(x.scales, tile.tokens),
        _boxes(weights.gate_up.data, 128),
        _boxes(act.data, tile.tokens), _scale_boxes(act.scales, tile.tokens),
        _boxes(weights.down.data, 128),
        weights.gate_up.scales, weights.down.scales, counts, space.tickets, space.ready,
        space.partials, space.given, space.busy, act.data, act.scales, out,
        weights.gate_up.data, weights.down.data,
        E=experts, E_POW2=max(32, power_of_two(experts)), M=capacity, H=hidden,
        SIZE=act.data.shape[-1], TOKENS=tile.tokens, PARTS=tile.parts, STAGES=tile.stages,
        NARROW=tile.narrow, SPLIT=tile.split, AHEAD=tile.ahead, PDL=tile.pdl, launch_pdl=tile.pdl, UE8M0=False, num_warps=4,
    )  # fmt: skip
