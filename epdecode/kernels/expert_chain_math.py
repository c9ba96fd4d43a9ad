"""Math warps of the fused expert chain: scaled accumulation, SwiGLU, quantisation, stores.

Two groups of four warps, each with 64 of every box's 128 weight rows, so that one's scaling
overlaps the other's matrix products.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from epdecode.kernels.expert_chain_load import advance, fence_proxies, give_back, take
from epdecode.kernels.expert_chain_shape import Cut, Ring
from epdecode.kernels.quant_math import group_scale, silu_mul


@gluon.jit
def _row_scales(ring: Ring, box, cut: Cut, layout: gl.constexpr):
    return ring.scales.index(box).reshape([cut.LANES]).slice(0, cut.TOKENS).load(layout)


@gluon.jit
def _block_scale(ring: Ring, place, step, cut: Cut):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat = ring.block_scales._reinterpret(gl.float32, [2 * cut.SLOTS * cut.BLOCKS, 1], words)
    return gl.max(flat.index(place * cut.BLOCKS + step).load(one), 0)


@gluon.jit
def _both(
    a, b, ring: Ring, stage, box_a, box_b, scale_a, scale_b, cut: Cut,
    GROUP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """a += this group's half of the first box of weights x rows, b += of the second."""
    layout: gl.constexpr = gl.SliceLayout(0, mma)
    zeros = gl.zeros([64, cut.TOKENS], gl.float32, layout=mma)
    rows_a = ring.rows.index(box_a).permute((1, 0))
    rows_b = ring.rows.index(box_b).permute((1, 0))
    weights_a = ring.weights.index(2 * stage).slice(64 * GROUP, 64)
    weights_b = ring.weights.index(2 * stage + 1).slice(64 * GROUP, 64)
    of_rows = _row_scales(ring, box_a, cut, layout)
    part_a = warpgroup_mma(weights_a, rows_a, zeros, use_acc=False, is_async=True)
    if cut.PARTS == 1:
        part_b = warpgroup_mma(weights_b, rows_b, zeros, use_acc=False, is_async=True)
        part_a = warpgroup_mma_wait(1, deps=[part_a])
        a += part_a * (of_rows * scale_a)[None, :]
    else:
        # Registers for one product at a time beside four sums.
        part_a = warpgroup_mma_wait(0, deps=[part_a])
        a += part_a * (of_rows * scale_a)[None, :]
        part_b = warpgroup_mma(weights_b, rows_b, zeros, use_acc=False, is_async=True)
    if cut.NARROW:
        of_rows = _row_scales(ring, box_b, cut, layout)
    part_b = warpgroup_mma_wait(0, deps=[part_b])
    b += part_b * (of_rows * scale_b)[None, :]
    return a, b


@gluon.jit
def _accumulate(
    ring: Ring, stage, phase, slot, cut: Cut,
    STEPS: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Run a tile's K loop, GROUPS block scales a step: (a, b) sums of each part.

    The second part is computed even where no rows came for it: a branch here would cost registers,
    and what it gives is never stored.
    """
    a0 = gl.zeros([64, cut.TOKENS], gl.float32, layout=mma)
    b0 = gl.zeros([64, cut.TOKENS], gl.float32, layout=mma)
    a1 = a0
    b1 = b0
    for step in range(STEPS):
        scale_a = _block_scale(ring, 2 * slot, step * GROUPS, cut)
        scale_b = _block_scale(ring, 2 * slot + 1, step * GROUPS + GROUPS - 1, cut)
        box = stage * cut.BOXES
        second = box + (GROUPS - 1) * cut.PARTS
        mbarrier.wait(ring.full.index(stage), phase)
        a0, b0 = _both(a0, b0, ring, stage, box, second, scale_a, scale_b, cut, GROUP, mma)
        if cut.PARTS == 2:
            a1, b1 = _both(
                a1, b1, ring, stage, box + 1, second + 1, scale_a, scale_b, cut, GROUP, mma
            )
        gl.thread_barrier()
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = advance(stage, phase, cut.STAGES)
    return (a0, b0, a1, b1), stage, phase


@gluon.jit
def _store(base, values, left, stride: gl.constexpr, cut: Cut):
    """values [64, TOKENS] transposed to ``base`` (token 0, column 0), the first ``left`` tokens."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    values = gl.convert_layout(values.permute((1, 0)), wide)
    row = gl.arange(0, cut.TOKENS, layout=gl.SliceLayout(1, wide))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, wide))
    gl.store(base + row[:, None] * stride + column[None, :], values, mask=(row < left)[:, None])


@gluon.jit
def _activate(
    gate, up, act, act_scales, expert, token, count, column, turn, ring: Ring, cut: Cut,
    GROUP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """silu(gate) * up, quantised over the tile's 128 columns, 64 here and 64 in the other group."""
    layout: gl.constexpr = gl.SliceLayout(0, mma)
    values = silu_mul(gate, up)
    mine = gl.max(gl.abs(values), 0)
    place = turn % 2 * 2
    ring.largest.index(place + GROUP).store(mine)
    gl.thread_barrier()
    mbarrier.arrive(ring.met, count=1)
    mbarrier.wait(ring.met, turn % 2)
    largest = gl.maximum(mine, ring.largest.index(place + 1 - GROUP).load(layout))
    scale, factor = group_scale(largest, False)
    values = tl.clamp(values * factor[None, :], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if GROUP == 0:
        at = token + gl.arange(0, cut.TOKENS, layout=layout)
        group = expert.to(gl.int64) * (cut.SIZE // 128) + column
        gl.store(act_scales + group * cut.M + at, scale, mask=at < count)
    base = act + (expert.to(gl.int64) * cut.M + token) * cut.SIZE + column * 128 + 64 * GROUP
    _store(base, values.to(gl.float8e4nv), count - token, cut.SIZE, cut)


@gluon.jit
def _finish_up(
    sums, act, act_scales, expert, token, count, column, turn, ring: Ring, cut: Cut,
    GROUP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    _activate(
        sums[0], sums[1], act, act_scales, expert, token, count, column, turn, ring, cut, GROUP, mma
    )
    turn += 1
    if cut.PARTS == 2:  # noqa: SIM102, only the inner test is left at run time
        if count - token > cut.TOKENS:
            _activate(
                sums[2], sums[3], act, act_scales, expert, token + cut.TOKENS, count, column, turn,
                ring, cut, GROUP, mma,
            )  # fmt: skip
            turn += 1
    return turn


@gluon.jit
def _write(a, b, out, expert, token, count, column, cut: Cut, GROUP: gl.constexpr):
    base = out + (expert.to(gl.int64) * cut.M + token) * cut.H + column * cut.DOWN_ROWS + 64 * GROUP
    if cut.NARROW:
        _store(base, (a + b).to(gl.bfloat16), count - token, cut.H, cut)
    else:
        _store(base, a.to(gl.bfloat16), count - token, cut.H, cut)
        _store(base + 128, b.to(gl.bfloat16), count - token, cut.H, cut)


@gluon.jit
def _finish_down(sums, out, expert, token, count, column, cut: Cut, GROUP: gl.constexpr):
    _write(sums[0], sums[1], out, expert, token, count, column, cut, GROUP)
    if cut.PARTS == 2:  # noqa: SIM102, only the inner test is left at run time
        if count - token > cut.TOKENS:
            _write(sums[2], sums[3], out, expert, token + cut.TOKENS, count, column, cut, GROUP)


@gluon.jit
def consume(act, act_scales, ready, out, ring: Ring, cut: Cut, GROUP: gl.constexpr) -> None:
    """Four warps: multiply half the weight rows of each tile, finish it and say so."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cut.TOKENS, 32])
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    turn = 0
    expert, column, tile, count = take(ring, slot, slot_phase)
    while expert >= 0:
        mbarrier.wait(ring.scaled.index(slot), slot_phase)
        token = tile * cut.TILE
        if column >= cut.UP_COLUMNS:
            column -= cut.UP_COLUMNS
            sums, stage, phase = _accumulate(
                ring, stage, phase, slot, cut, cut.DOWN_STEPS, cut.DOWN_GROUPS, GROUP, mma
            )
            give_back(ring, slot)
            _finish_down(sums, out, expert, token, count, column, cut, GROUP)
        else:
            sums, stage, phase = _accumulate(
                ring, stage, phase, slot, cut, cut.UP_STEPS, 1, GROUP, mma
            )
            give_back(ring, slot)
            turn = _finish_up(
                sums, act, act_scales, expert, token, count, column, turn, ring, cut, GROUP, mma
            )
            fence_proxies()
            gl.thread_barrier()
            gl.atomic_add(ready + expert * cut.TILES_M + tile, 1, sem="release")
        slot, slot_phase = advance(slot, slot_phase, cut.SLOTS)
        expert, column, tile, count = take(ring, slot, slot_phase)
