"""The whole expert chain in one persistent kernel for Hopper: gate-up, SwiGLU, quantisation, down.

One program per SM. One warp streams weights without pause through a ring in shared memory, across
tiles and across the border between the two GEMMs; one loads rows, one block scales; eight
multiply. Down tiles wait, rows only, until the activations of their expert are written. Tiles are
taken from a counter, gate-up tiles first, so a tile only ever waits for earlier ones, and those
are with programs that run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from epdecode.batch import ExpertWeights, Fp8Rows
from epdecode.kernels.checks import check
from epdecode.kernels.expert_chain_load import load_block_scales, load_rows, load_weights
from epdecode.kernels.expert_chain_math import consume
from epdecode.kernels.expert_chain_shape import Cut, Ring
from epdecode.kernels.fp8 import mn_major_scales
from epdecode.kernels.launch import launch_options, persistent_programs, power_of_two


@gluon.jit
def _chain_kernel(
    x, x_scales, w1, act_rows, act_row_scales, w2, w1_scales, w2_scales, counts, tickets, ready,
    partials, arrived, act, act_scales, out,
    E: gl.constexpr, E_POW2: gl.constexpr, M: gl.constexpr, H: gl.constexpr, SIZE: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, NARROW: gl.constexpr,
    SPLITS: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    cut = Cut(E, E_POW2, M, H, SIZE, TOKENS, STAGES, NARROW, SPLITS, PLACES)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = Ring(
        gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], w1.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES * cut.BOXES, cut.BOX_M, 128], x.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES * cut.BOXES, 1, cut.LANES], x_scales.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int32, [5 * cut.SLOTS, 1], words),
        gl.allocate_shared_memory(gl.int64, [cut.SLOTS, 1], barrier),
        gl.allocate_shared_memory(gl.float32, [2 * cut.SLOTS, cut.BLOCKS], words),
        gl.allocate_shared_memory(gl.int64, [cut.SLOTS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [cut.SLOTS, 1], barrier),
        gl.allocate_shared_memory(gl.float32, [4, cut.BOX_M], words),
        gl.allocate_shared_memory(gl.int64, [1], barrier),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(i), count=2)
        mbarrier.init(ring.empty.index(i), count=2)
    for i in gl.static_range(cut.SLOTS):
        mbarrier.init(ring.posted.index(i), count=1)
        mbarrier.init(ring.scaled.index(i), count=1)
        mbarrier.init(ring.taken.index(i), count=4)
    mbarrier.init(ring.met, count=2)
    gl.warp_specialize(
        [
            (load_block_scales, (w1_scales, w2_scales, ring, cut)),
            (consume, (act, act_scales, ready, partials, arrived, out, ring, cut, 0)),
            (consume, (act, act_scales, ready, partials, arrived, out, ring, cut, 1)),
            (load_weights, (w1, w2, counts, tickets, ring, cut)),
            (load_rows, (x, x_scales, act_rows, act_row_scales, ready, ring, cut)),
        ],
        [4, 4, 1, 1],
        [232, 232, 24, 24],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTile:
    """How the fused chain is cut."""

    tokens: int = 16
    """Rows of a tile: 16, 32, 64 or 128; weights are read once for each."""
    stages: int = 6
    """Steps of 32 KiB of weights under way per SM."""
    narrow: bool = False
    """Down tiles of 128 instead of 256 weight rows, 256 columns a step: a shorter tail. Up to 32
    rows only."""
    splits: int = 1
    """Parts of a gate-up tile's K, 1, 2, 4 or 8, that different SMs take: where tiles are few.

    Loads whose tiles' sums do not fit the space run unsplit.
    """


MOST_SPLITS = 8
PARTIAL_FLOATS = 1 << 22
"""16 MiB: more would cost as much time as the parts gain, and leave L2."""


@dataclass(frozen=True, slots=True)
class ChainSpace:
    """Buffers one chain launch uses, shared by layers that run one after the other.

    act: e4m3 [E, M, I] with MN-major scales of strides (M * I/128, 1, M). tickets int32 [1] and
    ready int32 [E * M/16 * (I/128 + 1)] (for each token tile: math groups done with each column,
    down tiles that saw all): zero before the first launch, and after each; so is arrived int32
    [2 x tiles] (parts of a gate-up tile handed over by each math group). partials float32: the
    sums of parts.
    """

    act: Fp8Rows
    tickets: torch.Tensor
    ready: torch.Tensor
    partials: torch.Tensor
    arrived: torch.Tensor


def empty_space(experts: int, capacity: int, size: int, device: torch.device) -> ChainSpace:
    """A space for any ChainTile; capacity a multiple of 4."""
    data = torch.empty(experts, capacity, size, dtype=torch.float8_e4m3fn, device=device)
    tiles, columns = experts * -(-capacity // 16), size // 128
    most = tiles * columns * MOST_SPLITS * 2 * 128 * 16
    sums = min(PARTIAL_FLOATS, most)
    return ChainSpace(
        Fp8Rows(data, mn_major_scales(experts, capacity, size // 128, "fp32", device)),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(tiles * (columns + 1), dtype=torch.int32, device=device),
        torch.empty(sums, dtype=torch.float32, device=device),
        torch.zeros(2 * (sums // (2 * 128 * 16)), dtype=torch.int32, device=device),
    )


def _boxes(rows: torch.Tensor, box_rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat = rows.view(-1, rows.shape[-1])
    return TensorDescriptor.from_tensor(flat, [box_rows, 128], layout)


def _scale_boxes(scales: torch.Tensor, tokens: int) -> TensorDescriptor:
    """MN-major scales as [E * groups, M], loaded a group of one tile at a time."""
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

    x: e4m3 [E, M, H] with float32 scales of strides (M * H/128, 1, M). weights: FP8 with 128x128
    block scales. Two launches on one space must follow one another in stream order.
    """
    experts, capacity, hidden = x.data.shape
    groups = hidden // 128
    strides = (capacity * groups, 1, capacity)
    check(x.scales.stride() == strides, "expert_chain", "x's scale strides", x.scales.stride(),
          f"{strides}, MN-major without padding")  # fmt: skip
    gate_up, down, act = weights.gate_up, weights.down, space.act
    assert isinstance(gate_up, Fp8Rows), "the fused chain reads FP8 weights"
    assert isinstance(down, Fp8Rows), "the fused chain reads FP8 weights"
    check(tile.tokens < 64 or not tile.narrow, "expert_chain", "narrow tiles' tokens", tile.tokens,
          "16 or 32")  # fmt: skip
    box = min(tile.tokens, 64)
    places = space.partials.numel() // (max(1, tile.splits - 1) * 256 * tile.tokens)
    _chain_kernel[(persistent_programs(x.data.device, 1, 1 << 30),)](
        _boxes(x.data, box), _scale_boxes(x.scales, box), _boxes(gate_up.data, 64),
        _boxes(act.data, box), _scale_boxes(act.scales, box), _boxes(down.data, 64),
        gate_up.scales, down.scales, counts, space.tickets, space.ready,
        space.partials, space.arrived, act.data, act.scales, out,
        E=experts, E_POW2=max(32, power_of_two(experts)), M=capacity, H=hidden,
        SIZE=act.data.shape[-1], TOKENS=tile.tokens, STAGES=tile.stages,
        NARROW=tile.narrow, SPLITS=tile.splits, PLACES=places if tile.splits > 1 else 0,
        num_warps=4, **launch_options(x.data.device),
    )  # fmt: skip
