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

from epdecode.kernels.expert_chain_load import advance, fence_proxies, give_back, take, up_steps
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
def _product(ring: Ring, weights, rows, cut: Cut, GROUP: gl.constexpr, mma: gl.constexpr):
    """Start this group's half of a box of weights x a box of rows."""
    zeros = gl.zeros([64, cut.TOKENS], gl.float32, layout=mma)
    left = ring.weights.index(weights).slice(64 * GROUP, 64)
    right = ring.rows.index(rows).permute((1, 0))
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)


@gluon.jit
def _one_part(
    sums, ring: Ring, stage, scale_a, scale_b, cut: Cut,
    GROUPS: gl.constexpr, GROUP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """One step's products of both boxes of weights, added to their sums."""
    layout: gl.constexpr = gl.SliceLayout(0, mma)
    box = stage * cut.BOXES
    a, b, none, nothing = sums
    product_a = _product(ring, 2 * stage, box, cut, GROUP, mma)
    product_b = _product(ring, 2 * stage + 1, box + GROUPS - 1, cut, GROUP, mma)
    of_rows = _row_scales(ring, box, cut, layout)
    product_a = warpgroup_mma_wait(1, deps=[product_a])
    a += product_a * (of_rows * scale_a)[None, :]
    if GROUPS == 2:
        of_rows = _row_scales(ring, box + 1, cut, layout)
    product_b = warpgroup_mma_wait(0, deps=[product_b])
    b += product_b * (of_rows * scale_b)[None, :]
    return a, b, none, nothing


@gluon.jit
def _two_parts(
    sums, ring: Ring, stage, scale_a, scale_b, cut: Cut,
    GROUPS: gl.constexpr, GROUP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The same for two parts of the rows: two products under way, registers for no more."""
    layout: gl.constexpr = gl.SliceLayout(0, mma)
    box = stage * cut.BOXES
    other = box + 2 * (GROUPS - 1)
    a0, b0, a1, b1 = sums
    product_a0 = _product(ring, 2 * stage, box, cut, GROUP, mma)
    product_a1 = _product(ring, 2 * stage, box + 1, cut, GROUP, mma)
    product_a0 = warpgroup_mma_wait(1, deps=[product_a0])
    a0 += product_a0 * (_row_scales(ring, box, cut, layout) * scale_a)[None, :]
    product_b0 = _product(ring, 2 * stage + 1, other, cut, GROUP, mma)
    product_a1 = warpgroup_mma_wait(1, deps=[product_a1])
    a1 += product_a1 * (_row_scales(ring, box + 1, cut, layout) * scale_a)[None, :]
    product_b1 = _product(ring, 2 * stage + 1, other + 1, cut, GROUP, mma)
    product_b0 = warpgroup_mma_wait(1, deps=[product_b0])
    b0 += product_b0 * (_row_scales(ring, other, cut, layout) * scale_b)[None, :]
    product_b1 = warpgroup_mma_wait(0, deps=[product_b1])
    b1 += product_b1 * (_row_scales(ring, other + 1, cut, layout) * scale_b)[None, :]
    return a0, b0, a1, b1


@gluon.jit
def _accumulate(
    ring: Ring, stage, phase, slot, first, end, cut: Cut,
    GROUPS: gl.constexpr, GROUP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Run K steps of a tile, GROUPS block scales a step: (a, b) sums of each part.

    The second part is computed even where no rows came for it: a branch here would cost registers,
    and what it gives is never stored.
    """
    zeros = gl.zeros([64, cut.TOKENS], gl.float32, layout=mma)
    sums = (zeros, zeros, zeros, zeros)
    for step in range(first, end):
        scale_a = _block_scale(ring, 2 * slot, step * GROUPS, cut)
        scale_b = _block_scale(ring, 2 * slot + 1, step * GROUPS + GROUPS - 1, cut)
        mbarrier.wait(ring.full.index(stage), phase)
        if cut.PARTS == 2:
            sums = _two_parts(sums, ring, stage, scale_a, scale_b, cut, GROUPS, GROUP, mma)
        else:
            sums = _one_part(sums, ring, stage, scale_a, scale_b, cut, GROUPS, GROUP, mma)
        gl.thread_barrier()
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = advance(stage, phase, cut.STAGES)
    return sums, stage, phase


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
def _places(cut: Cut, mma: gl.constexpr):
    """Where each of [64, TOKENS] sums is handed over: a register of all threads side by side."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    column = gl.arange(0, cut.TOKENS, layout=gl.SliceLayout(0, mma))
    row = row // 16 * 64 + row % 16 // 8 * 256 + row % 8 * 8
    column = column // 8 * 512 + column % 8
    return row[:, None] + column[None, :]


@gluon.jit
def _hand_over(sums, partials, part, two, cut: Cut, GROUP: gl.constexpr, mma: gl.constexpr):
    """Write this group's sums of one part of a tile: [gate, up] of each PARTS."""
    size: gl.constexpr = 64 * cut.TOKENS
    at = partials + (part.to(gl.int64) * 2 + GROUP) * (2 * cut.PARTS * size) + _places(cut, mma)
    gl.store(at, sums[0])
    gl.store(at + size, sums[1])
    if cut.PARTS == 2:  # noqa: SIM102, only the inner test is left at run time
        if two:
            gl.store(at + 2 * size, sums[2])
            gl.store(at + 3 * size, sums[3])


@gluon.jit
def _theirs(at, split, cut: Cut):
    return gl.load(at + split * (4 * cut.PARTS * 64 * cut.TOKENS), cache_modifier=".cg")


@gluon.jit
def _total(own, at, split, cut: Cut):
    """The sum over all parts, ``own`` and what others handed over: the same whichever is own."""
    total = own + _theirs(at, split ^ 1, cut)
    if cut.SPLITS > 2:
        total += _theirs(at, split ^ 2, cut) + _theirs(at, split ^ 3, cut)
    if cut.SPLITS > 4:
        more = _theirs(at, split ^ 4, cut) + _theirs(at, split ^ 5, cut)
        total += more + (_theirs(at, split ^ 6, cut) + _theirs(at, split ^ 7, cut))
    return total


@gluon.jit
def _gather(sums, partials, part, two, cut: Cut, GROUP: gl.constexpr, mma: gl.constexpr):
    """The sums of the whole tile, once all its parts are handed over."""
    size: gl.constexpr = 64 * cut.TOKENS
    split = part % cut.SPLITS
    start = (part - split).to(gl.int64) * 2 + GROUP
    at = partials + start * (2 * cut.PARTS * size) + _places(cut, mma)
    a0 = _total(sums[0], at, split, cut)
    b0 = _total(sums[1], at + size, split, cut)
    a1 = sums[2]
    b1 = sums[3]
    if cut.PARTS == 2:  # noqa: SIM102, only the inner test is left at run time
        if two:
            a1 = _total(sums[2], at + 2 * size, split, cut)
            b1 = _total(sums[3], at + 3 * size, split, cut)
    return a0, b0, a1, b1


@gluon.jit
def _came_last(arrived, part, turn, ring: Ring, cut: Cut, GROUP: gl.constexpr):
    """Whether all other parts of the tile were handed over before this one; two turns to meet.

    Nobody waits for another part: who comes last has them all.
    """
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.thread_barrier()
    mbarrier.arrive(ring.met, count=1)
    mbarrier.wait(ring.met, turn % 2)
    if GROUP == 0:
        counter = arrived + part // cut.SPLITS
        before = gl.atomic_add(counter, 1, sem="acq_rel")
        if before == cut.SPLITS - 1:
            gl.store(counter, 0)
        ring.arrivals.store(gl.full([1], before, gl.int32, layout=one))
    gl.thread_barrier()
    mbarrier.arrive(ring.met, count=1)
    mbarrier.wait(ring.met, (turn + 1) % 2)
    return gl.max(ring.arrivals.load(one), 0) == cut.SPLITS - 1


@gluon.jit
def _finish_up(
    sums, act, act_scales, ready, expert, tile, count, column, turn, ring: Ring, cut: Cut,
    GROUP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Activate a gate-up tile's sums, write them and count them as ready."""
    token = tile * cut.TILE
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
    fence_proxies()
    gl.thread_barrier()
    flags = ready + (expert * cut.TILES_M + tile) * (cut.UP_COLUMNS + 1)
    gl.atomic_add(flags + column, 1, sem="release")
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
def consume(
    act, act_scales, ready, partials, arrived, out, ring: Ring, cut: Cut, GROUP: gl.constexpr
) -> None:
    """Four warps: multiply half the weight rows of each tile, finish it and say so."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cut.TOKENS, 32])
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    turn = 0
    expert, column, tile, count, part = take(ring, slot, slot_phase)
    while expert >= 0:
        mbarrier.wait(ring.scaled.index(slot), slot_phase)
        if column >= cut.UP_COLUMNS:
            column -= cut.UP_COLUMNS
            sums, stage, phase = _accumulate(
                ring, stage, phase, slot, 0, cut.DOWN_STEPS, cut, cut.DOWN_GROUPS, GROUP, mma
            )
            give_back(ring, slot)
            _finish_down(sums, out, expert, tile * cut.TILE, count, column, cut, GROUP)
        else:
            first, end = up_steps(part, cut)
            sums, stage, phase = _accumulate(
                ring, stage, phase, slot, first, end, cut, 1, GROUP, mma
            )
            give_back(ring, slot)
            last = part < 0
            if cut.SPLITS > 1:  # noqa: SIM102, only the inner test is left at run time
                if part >= 0:
                    two = count - tile * cut.TILE > cut.TOKENS
                    _hand_over(sums, partials, part, two, cut, GROUP, mma)
                    last = _came_last(arrived, part, turn, ring, cut, GROUP)
                    turn += 2
                    if last:
                        sums = _gather(sums, partials, part, two, cut, GROUP, mma)
            if last:
                turn = _finish_up(
                    sums, act, act_scales, ready, expert, tile, count, column, turn, ring, cut,
                    GROUP, mma,
                )  # fmt: skip
        slot, slot_phase = advance(slot, slot_phase, cut.SLOTS)
        expert, column, tile, count, part = take(ring, slot, slot_phase)
