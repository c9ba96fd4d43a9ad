"""Loading warps of the fused expert chain: weights of tile after tile, their rows and scales.

No future annotations here: the compiler reads the annotations of aggregates as types.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from epdecode.kernels.expert_chain_shape import Cut, Ring
from epdecode.kernels.expert_chain_tiles import (
    advance,
    give_back,
    let_first_of_pairs_begin,
    load_acquire,
    on_second_of_pair,
    post,
    take,
    tile_of,
    up_steps,
)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def fence_proxies() -> None:
    """Order ordinary global accesses against bulk copies, here and in other programs."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_kernel_before() -> None:
    """Until the kernel before has ended and all it wrote is there; the next may then be set up.

    A program of the next kernel gets its SM when this one leaves it, and waits here in turn.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r", [], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _stream_weights(
    w, row, second_row, second_k, first, end, stage, phase, ring: Ring, cut: Cut,
    STEP: gl.constexpr, MIXED: gl.constexpr,
):  # fmt: skip
    """Two boxes of 128 rows a step: from ``row``, and ``second_row`` rows, ``second_k`` columns on.

    MIXED: each box is the first 64 rows of both, or the last.
    """
    for step in range(first, end):
        bar = ring.full.index(stage)
        k = step * STEP
        mbarrier.wait(ring.empty.index(stage), phase)
        mbarrier.expect(bar, 2 * 128 * 128)
        one = ring.weights.index(2 * stage)
        two = ring.weights.index(2 * stage + 1)
        other = row + second_row
        end_of_one = one.slice(64, 64)
        start_of_two = two.slice(0, 64)
        if MIXED:
            tma.async_copy_global_to_shared(w, [row + 64, k], bar, start_of_two)
            tma.async_copy_global_to_shared(w, [other, k], bar, end_of_one)
        else:
            tma.async_copy_global_to_shared(w, [row + 64, k], bar, end_of_one)
            tma.async_copy_global_to_shared(w, [other, k + second_k], bar, start_of_two)
        tma.async_copy_global_to_shared(w, [row, k], bar, one.slice(0, 64))
        tma.async_copy_global_to_shared(w, [other + 64, k + second_k], bar, two.slice(64, 64))
        stage, phase = advance(stage, phase, cut.STAGES)
    return stage, phase


@gluon.jit
def load_weights(w1, w2, counts, tickets, ring: Ring, cut: Cut) -> None:
    """One warp: takes tiles in order, all gate-up tiles first, and streams their weights.

    An expert's gate-up tiles are in the order of columns, then parts, then token tiles: what adds
    up to one tile is done at the same time, and so is what reads the same weights.
    """
    layout: gl.constexpr = gl.BlockedLayout([cut.E_POW2 // 32], [32], [1], [0])
    await_kernel_before()
    experts = gl.arange(0, cut.E_POW2, layout=layout)
    rows = gl.load(counts + experts, mask=experts < cut.E, other=0)
    late = on_second_of_pair() if cut.FEW else False
    ticket = gl.atomic_add(tickets, 1, mask=late == 0, sem="relaxed")
    ends = gl.associative_scan((rows + cut.TOKENS - 1) // cut.TOKENS, 0, _add)
    tiles = gl.max(ends, 0)
    splits = gl.where(tiles * cut.UP_COLUMNS <= cut.PLACES, cut.SPLITS, 1)
    up_tiles = tiles * cut.UP_COLUMNS * splits
    total = up_tiles + tiles * cut.DOWN_COLUMNS
    if late:
        let_first_of_pairs_begin(tickets, up_tiles)
        ticket = gl.atomic_add(tickets, 1, sem="relaxed")
    stage = 0
    phase = 1
    slot = 0
    slot_phase = 1
    while ticket < total:
        is_down = ticket >= up_tiles
        columns = gl.where(is_down, cut.DOWN_COLUMNS, cut.UP_COLUMNS * splits)
        index = gl.where(is_down, ticket - up_tiles, ticket)
        expert, count, mine, start, column, tile = tile_of(index, columns, rows, ends, experts)
        mbarrier.wait(ring.taken.index(slot), slot_phase)
        if is_down:
            post(ring, slot, expert, column + cut.UP_COLUMNS, tile, count, -1)
            row = expert * cut.H + column * cut.DOWN_ROWS
            stage, phase = _stream_weights(
                w2, row, cut.DOWN_ROWS - 128, 256 - cut.DOWN_ROWS, 0, cut.DOWN_STEPS,
                stage, phase, ring, cut, 128 * cut.DOWN_GROUPS, False,
            )  # fmt: skip
        else:
            split = column % splits
            column = column // splits
            place = start * cut.UP_COLUMNS + column * mine + tile
            part = gl.where(splits == 1, -1, place * cut.SPLITS + split)
            post(ring, slot, expert, column, tile, count, part)
            row = expert * (2 * cut.SIZE) + column * 128
            first, end = up_steps(part, cut)
            stage, phase = _stream_weights(
                w1, row, cut.SIZE, 0, first, end, stage, phase, ring, cut, 128, cut.ROWS_LEFT
            )
        slot, slot_phase = advance(slot, slot_phase, cut.SLOTS)
        ticket = gl.atomic_add(tickets, 1, sem="relaxed")
    # Every program takes one ticket too many; who takes the last starts over for the next launch.
    if ticket == total + gl.num_programs(0) - 1:
        gl.store(tickets, 0)
    mbarrier.wait(ring.taken.index(slot), slot_phase)
    post(ring, slot, -1, 0, 0, 0, -1)


@gluon.jit
def _load_box(data, scales, row, group, scale_row, token, bar, ring: Ring, box):
    tma.async_copy_global_to_shared(data, [row, group * 128], bar, ring.rows.index(box))
    tma.async_copy_global_to_shared(scales, [scale_row + group, token], bar, ring.scales.index(box))


@gluon.jit
def _load_step(
    data, scales, row, group, scale_row, token, stage, two, ring: Ring, cut: Cut,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Rows and scales of one stage: GROUPS groups of columns, one or two boxes of rows."""
    bar = ring.full.index(stage)
    size: gl.constexpr = cut.BOX_M * 128 + cut.LANES * 4
    if cut.BOXES_M == 1:
        mbarrier.expect(bar, GROUPS * size)
    else:
        mbarrier.expect(bar, 2 * GROUPS * size, pred=two)
        mbarrier.expect(bar, GROUPS * size, pred=two == 0)
    for g in gl.static_range(GROUPS):
        box = stage * cut.BOXES + g * cut.BOXES_M
        _load_box(data, scales, row, group + g, scale_row, token, bar, ring, box)
        if cut.BOXES_M == 2:  # noqa: SIM102, only the inner test is left at run time
            if two:
                _load_box(
                    data, scales, row + 64, group + g, scale_row, token + 64,
                    bar, ring, box + 1,
                )  # fmt: skip


@gluon.jit
def _columns_ready(flags, cut: Cut):
    """How many gate-up columns of these rows are written, counted from the first without a gap."""
    layout: gl.constexpr = gl.BlockedLayout([cut.FLAGS // 32], [32], [1], [0])
    lane = gl.arange(0, cut.FLAGS, layout=layout)
    seen = load_acquire(flags + gl.where(lane < cut.UP_COLUMNS, lane, 0))
    late = gl.where((seen < 2) & (lane < cut.UP_COLUMNS), lane, cut.UP_COLUMNS)
    done = gl.min(late, 0)
    gl.thread_barrier()
    fence_proxies()
    return done


@gluon.jit
def _pass(flags, cut: Cut):
    """Say that a down tile has seen all flags of its rows; who says so last clears them."""
    layout: gl.constexpr = gl.BlockedLayout([cut.FLAGS // 32], [32], [1], [0])
    lane = gl.arange(0, cut.FLAGS, layout=layout)
    passed = gl.atomic_add(flags + cut.UP_COLUMNS, 1, sem="relaxed")
    clear = (lane <= cut.UP_COLUMNS) & (passed == cut.DOWN_COLUMNS - 1)
    gl.store(flags + lane, gl.zeros_like(lane), mask=clear)


@gluon.jit
def load_rows(x, x_scales, act, act_scales, ready, ring: Ring, cut: Cut) -> None:
    """One warp: loads the rows of each tile; a down tile's as its activations are there."""
    stage = 0
    phase = 1
    slot = 0
    slot_phase = 0
    expert, column, tile, count, part = take(ring, slot, slot_phase)
    while expert >= 0:
        give_back(ring, slot)
        slot, slot_phase = advance(slot, slot_phase, cut.SLOTS)
        token = tile * cut.TOKENS
        row = expert * cut.M + token
        two = count - token > 64
        if column >= cut.UP_COLUMNS:
            flags = ready + (expert * cut.TILES_M + tile) * (cut.UP_COLUMNS + 1)
            scale_row = expert * (cut.SIZE // 128)
            done = 0
            for step in range(cut.DOWN_STEPS):
                group = step * cut.DOWN_GROUPS
                while done < group + cut.DOWN_GROUPS:
                    done = _columns_ready(flags, cut)
                mbarrier.wait(ring.empty.index(stage), phase)
                _load_step(
                    act, act_scales, row, group, scale_row, token, stage, two, ring, cut,
                    cut.DOWN_GROUPS,
                )  # fmt: skip
                stage, phase = advance(stage, phase, cut.STAGES)
            _pass(flags, cut)
        else:
            scale_row = expert * (cut.H // 128)
            first, end = up_steps(part, cut)
            for step in range(first, end):
                mbarrier.wait(ring.empty.index(stage), phase)
                _load_step(x, x_scales, row, step, scale_row, token, stage, two, ring, cut, 1)
                stage, phase = advance(stage, phase, cut.STAGES)
        expert, column, tile, count, part = take(ring, slot, slot_phase)


@gluon.jit
def load_block_scales(w1_scales, w2_scales, ring: Ring, cut: Cut) -> None:
    """Four warps: copy the block scales of each tile's two halves into shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, cut.BLOCKS, layout=layout)
    slot = 0
    phase = 0
    expert, column, _, _, _ = take(ring, slot, phase)
    while expert >= 0:
        if column >= cut.UP_COLUMNS:
            block = expert * (cut.H // 128) + (column - cut.UP_COLUMNS) * (cut.DOWN_ROWS // 128)
            first = w2_scales + block * (cut.SIZE // 128)
            second = first + (cut.DOWN_ROWS // 128 - 1) * (cut.SIZE // 128)
            blocks = cut.SIZE // 128
        else:
            first = w1_scales + (expert * (2 * cut.UP_COLUMNS) + column) * (cut.H // 128)
            second = first + cut.UP_COLUMNS * (cut.H // 128)
            blocks = cut.H // 128
        a = gl.load(first + lane, mask=lane < blocks, other=0.0)
        b = gl.load(second + lane, mask=lane < blocks, other=0.0)
        ring.block_scales.index(2 * slot).store(a)
        ring.block_scales.index(2 * slot + 1).store(b)
        gl.thread_barrier()
        mbarrier.arrive(ring.scaled.index(slot), count=1)
        give_back(ring, slot)
        slot, phase = advance(slot, phase, cut.SLOTS)
        expert, column, _, _, _ = take(ring, slot, phase)
