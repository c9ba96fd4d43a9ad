"""Math warps of the fused expert chain: scaled accumulation, SwiGLU, quantisation, stores.

Two groups of four warps share every step, so that one's scaling overlaps the other's products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from epdecode.kernels.expert_chain_load import fence_proxies
from epdecode.kernels.expert_chain_rows_left import (
    activate_rows_left,
    add_rows_left,
    write_rows_left,
)
from epdecode.kernels.expert_chain_shape import Cut, Ring
from epdecode.kernels.expert_chain_sums import gather, hand_over
from epdecode.kernels.expert_chain_tiles import advance, give_back, take, up_steps
from epdecode.kernels.expert_chain_weights_left import (
    activate_weights_left,
    add_weights_left,
    write_weights_left,
)


@gluon.jit
def _accumulate(
    ring: Ring, stage, phase, slot, first, end, cut: Cut,
    IS_UP: gl.constexpr, GROUP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Run K steps of a tile: this group's sums of both boxes of weights."""
    a = gl.zeros([64, 128 if cut.ROWS_LEFT else cut.TOKENS], gl.float32, layout=mma)
    b = a
    for step in range(first, end):
        mbarrier.wait(ring.full.index(stage), phase)
        if cut.ROWS_LEFT:
            a, b = add_rows_left(a, b, ring, stage, slot, step, cut, IS_UP, GROUP, mma)
        else:
            a, b = add_weights_left(a, b, ring, stage, slot, step, cut, IS_UP, GROUP, mma)
        gl.thread_barrier()
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = advance(stage, phase, cut.STAGES)
    return (a, b), stage, phase


@gluon.jit
def _finish_up(
    sums, act, act_scales, ready, expert, tile, token, count, column, turn, ring: Ring, cut: Cut,
    GROUP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Activate a gate-up tile's sums, write them and count them as ready."""
    a, b = sums
    if cut.ROWS_LEFT:
        if token < count:
            activate_rows_left(
                a, b, act, act_scales, expert, token, count, column, turn, ring, cut, GROUP
            )
    else:
        activate_weights_left(
            a, b, act, act_scales, expert, token, count, column, turn, ring, cut, GROUP, mma
        )
    fence_proxies()
    gl.thread_barrier()
    flags = ready + (expert * cut.TILES_M + tile) * (cut.UP_COLUMNS + 1)
    gl.atomic_add(flags + column, 1, sem="release")


@gluon.jit
def consume(
    act, act_scales, ready, partials, arrived, out, ring: Ring, cut: Cut, GROUP: gl.constexpr
) -> None:
    """Four warps: multiply their share of each tile, finish it and say so."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, 128 if cut.ROWS_LEFT else cut.TOKENS, 32]
    )
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    turn = 0
    expert, column, tile, count, part = take(ring, slot, slot_phase)
    while expert >= 0:
        mbarrier.wait(ring.scaled.index(slot), slot_phase)
        token = tile * cut.TOKENS + (cut.BOXES_M - 1) * GROUP * 64
        if column >= cut.UP_COLUMNS:
            column -= cut.UP_COLUMNS
            sums, stage, phase = _accumulate(
                ring, stage, phase, slot, 0, cut.DOWN_STEPS, cut, False, GROUP, mma
            )
            give_back(ring, slot)
            a, b = sums
            if cut.ROWS_LEFT:
                write_rows_left(a, b, out, expert, token, count, column, cut, GROUP)
            else:
                write_weights_left(a, b, out, expert, token, count, column, cut, GROUP)
        else:
            first, end = up_steps(part, cut)
            sums, stage, phase = _accumulate(
                ring, stage, phase, slot, first, end, cut, True, GROUP, mma
            )
            give_back(ring, slot)
            last = True
            if cut.SPLITS > 1:
                last = (part < 0) | (part % cut.SPLITS == cut.SPLITS - 1)
                if (part >= 0) & (token < count):
                    if last:
                        sums = gather(sums, partials, arrived, part, cut, GROUP, mma)
                    else:
                        hand_over(sums, partials, arrived, part, cut, GROUP, mma)
            if last:
                _finish_up(
                    sums, act, act_scales, ready, expert, tile, token, count, column, turn, ring,
                    cut, GROUP, mma,
                )  # fmt: skip
                turn += 1
        slot, slot_phase = advance(slot, slot_phase, cut.SLOTS)
        expert, column, tile, count, part = take(ring, slot, slot_phase)
