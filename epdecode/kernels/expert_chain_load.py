"""Loading warps of the fused expert chain: which tile comes next, its weights and its rows.

No future annotations here: the compiler reads the annotations of aggregates as types.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate


@aggregate
class Cut:
    """Compile-time figures of one chain, in the shape letters of ``epdecode.batch``."""

    E: gl.constexpr
    E_POW2: gl.constexpr
    M: gl.constexpr
    H: gl.constexpr
    SIZE: gl.constexpr
    TOKENS: gl.constexpr
    PARTS: gl.constexpr
    STAGES: gl.constexpr
    SLOTS: gl.constexpr
    NARROW: gl.constexpr
    SPLIT: gl.constexpr
    AHEAD: gl.constexpr
    TILE: gl.constexpr
    TILES_M: gl.constexpr
    UP_COLUMNS: gl.constexpr
    DOWN_COLUMNS: gl.constexpr
    UP_STEPS: gl.constexpr
    DOWN_STEPS: gl.constexpr
    DOWN_ROWS: gl.constexpr
    BOXES: gl.constexpr
    LANES: gl.constexpr
    BLOCKS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, E, E_POW2, M, H, SIZE, TOKENS, PARTS, STAGES, NARROW, SPLIT, AHEAD):
        self.E = gl.constexpr(E)
        self.E_POW2 = gl.constexpr(E_POW2)
        self.M = gl.constexpr(M)
        self.H = gl.constexpr(H)
        self.SIZE = gl.constexpr(SIZE)
        self.TOKENS = gl.constexpr(TOKENS)
        self.PARTS = gl.constexpr(PARTS)
        self.STAGES = gl.constexpr(STAGES)
        self.SLOTS = gl.constexpr(2)
        self.NARROW = gl.constexpr(NARROW)
        self.SPLIT = gl.constexpr(SPLIT)
        self.AHEAD = gl.constexpr(AHEAD)
        self.TILE = gl.constexpr(TOKENS * PARTS)
        self.TILES_M = gl.constexpr(-(-M // (TOKENS * PARTS)))
        self.UP_COLUMNS = gl.constexpr(SIZE // 128)
        self.DOWN_ROWS = gl.constexpr(128 if NARROW else 256)
        self.DOWN_COLUMNS = gl.constexpr(H // (128 if NARROW else 256))
        self.UP_STEPS = gl.constexpr(H // 128 // SPLIT)
        self.DOWN_STEPS = gl.constexpr(SIZE // (256 if NARROW else 128))
        self.BOXES = gl.constexpr(PARTS * (2 if NARROW else 1))
        # A bulk copy's target is aligned to 128 bytes, so a box of scales has no fewer.
        self.LANES = gl.constexpr(max(32, TOKENS))
        blocks = max(H, SIZE) // 128
        self.BLOCKS = gl.constexpr(max(32, 1 << (blocks - 1).bit_length()))


@aggregate
class Ring:
    """Shared memory between the loading warps and the math warps, with its barriers.

    A stage holds two 128x128 boxes of weights and up to BOXES boxes of rows with their scales;
    ``full`` completes when both loaders' bytes have come, ``empty`` when the stage was used.
    ``schedule`` carries four words a tile from the weight loader to the others.
    """

    weights: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    schedule: gl.shared_memory_descriptor
    block_scales: gl.shared_memory_descriptor
    largest: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor
    scaled: gl.shared_memory_descriptor
    posted: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self,
        weights,
        rows,
        scales,
        full,
        empty,
        schedule,
        block_scales,
        largest,
        met,
        scaled,
        posted,
        taken,
    ):
        self.weights = weights
        self.rows = rows
        self.scales = scales
        self.full = full
        self.empty = empty
        self.schedule = schedule
        self.block_scales = block_scales
        self.largest = largest
        self.met = met
        self.scaled = scaled
        self.posted = posted
        self.taken = taken


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def fence_proxies():
    """Order ordinary global accesses against bulk copies, here and in other programs."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_acquire(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l",
        [pointer.to(gl.uint64)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _wait_for_previous_kernel():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def advance(index, phase, LENGTH: gl.constexpr):
    """The next place in a ring of LENGTH and its barriers' parity."""
    wrapped = index + 1 == LENGTH
    return gl.where(wrapped, 0, index + 1), phase ^ wrapped.to(gl.int32)


@gluon.jit
def _post(ring, slot, expert, column, tile, count, split):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.schedule.index(4 * slot).store(gl.full([1], expert, gl.int32, layout=one))
    ring.schedule.index(4 * slot + 1).store(gl.full([1], column * 8 + split, gl.int32, layout=one))
    ring.schedule.index(4 * slot + 2).store(gl.full([1], tile, gl.int32, layout=one))
    ring.schedule.index(4 * slot + 3).store(gl.full([1], count, gl.int32, layout=one))
    mbarrier.arrive(ring.posted.index(slot), count=1)


@gluon.jit
def take(ring, slot, phase):
    """(expert, column, token tile, rows of the expert, K part) of the next tile; expert -1 = end.

    Columns count on from the gate-up columns into the down columns.
    """
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(ring.posted.index(slot), phase)
    expert = gl.max(ring.schedule.index(4 * slot).load(one), 0)
    column = gl.max(ring.schedule.index(4 * slot + 1).load(one), 0)
    tile = gl.max(ring.schedule.index(4 * slot + 2).load(one), 0)
    count = gl.max(ring.schedule.index(4 * slot + 3).load(one), 0)
    return expert, column // 8, tile, count, column % 8


@gluon.jit
def give_back(ring, slot):
    """Say that this partition needs the slot's words and block scales no more."""
    gl.thread_barrier()
    mbarrier.arrive(ring.taken.index(slot), count=1)


@gluon.jit
def _next_ticket(tickets, total):
    """Take the next tile; whoever takes the last ticket winds the counter back for the next run."""
    programs = gl.num_programs(0)
    ticket = gl.atomic_add(tickets, 1, sem="relaxed")
    last = gl.maximum(total - programs, 0) + gl.minimum(programs, total) - 1
    if ticket == last:
        gl.store(tickets, 0)
    return programs + ticket


@gluon.jit
def _fetch_ahead(weights, row, k, WIDTH: gl.constexpr, cut):
    """Bring AHEAD blocks of 128 columns of 128 weight rows into L2."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    rows = (row + gl.arange(0, 128, layout=layout)).to(gl.int64)
    address = (weights + rows * WIDTH + k).to(gl.uint64)
    if cut.AHEAD == 2:
        asm: gl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;"
    elif cut.AHEAD == 4:
        asm: gl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 512; mov.b32 $0, 0;"
    else:
        asm: gl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 1024; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,l", [address], gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_weights(w1, w2, w1_data, w2_data, counts, tickets, ring, cut, PDL: gl.constexpr):
    """One warp: takes tiles in order, all gate-up tiles first, and streams their weights."""
    if PDL:
        _wait_for_previous_kernel()
    layout: gl.constexpr = gl.BlockedLayout([cut.E_POW2 // 32], [32], [1], [0])
    experts = gl.arange(0, cut.E_POW2, layout=layout)
    rows = gl.load(counts + experts, mask=experts < cut.E, other=0)
    ends = gl.associative_scan((rows + cut.TILE - 1) // cut.TILE, 0, _add)
    up_tiles = gl.max(ends, 0) * (cut.UP_COLUMNS * cut.SPLIT)
    total = up_tiles + gl.max(ends, 0) * cut.DOWN_COLUMNS
    ticket = gl.program_id(0)
    stage = 0
    phase = 1
    slot = 0
    slot_phase = 1
    while ticket < total:
        is_down = ticket >= up_tiles
        columns = gl.where(is_down, cut.DOWN_COLUMNS, cut.UP_COLUMNS * cut.SPLIT)
        index = gl.where(is_down, ticket - up_tiles, ticket)
        before = ends * columns <= index
        expert = gl.sum(before.to(gl.int32), 0)
        start = gl.max(gl.where(before, ends, 0), 0)
        mine = gl.sum(gl.where(experts == expert, ends, 0), 0) - start
        count = gl.sum(gl.where(experts == expert, rows, 0), 0)
        index -= start * columns
        parts = gl.where(is_down, 1, cut.SPLIT)
        split = index % parts
        index = index // parts
        column = index // mine
        mbarrier.wait(ring.taken.index(slot), slot_phase)
        place = column + gl.where(is_down, cut.UP_COLUMNS, 0)
        _post(ring, slot, expert, place, index % mine, count, split)
        slot, slot_phase = advance(slot, slot_phase, cut.SLOTS)
        if is_down:
            row = expert * cut.H + column * cut.DOWN_ROWS
            second: gl.constexpr = 0 if cut.NARROW else 128
            for step in range(cut.DOWN_STEPS):
                k = step * (256 if cut.NARROW else 128)
                if cut.AHEAD > 0:
                    block = k // 128
                    if (block % cut.AHEAD == 0) & (block + 2 * cut.AHEAD <= cut.SIZE // 128):
                        _fetch_ahead(w2_data, row, k + 128 * cut.AHEAD, cut.SIZE, cut)
                        if not cut.NARROW:
                            _fetch_ahead(w2_data, row + 128, k + 128 * cut.AHEAD, cut.SIZE, cut)
                bar = ring.full.index(stage)
                mbarrier.wait(ring.empty.index(stage), phase)
                mbarrier.expect(bar, 2 * 128 * 128)
                box = ring.weights.index(2 * stage)
                tma.async_copy_global_to_shared(w2, [row, k], bar, box)
                box = ring.weights.index(2 * stage + 1)
                tma.async_copy_global_to_shared(w2, [row + second, k + 128 - second], bar, box)
                stage, phase = advance(stage, phase, cut.STAGES)
        else:
            row = expert * (2 * cut.SIZE) + column * 128
            for step in range(split * cut.UP_STEPS, (split + 1) * cut.UP_STEPS):
                if cut.AHEAD > 0:
                    left = (split + 1) * cut.UP_STEPS - step
                    if ((left - cut.UP_STEPS) % cut.AHEAD == 0) & (left >= 2 * cut.AHEAD):
                        k = (step + cut.AHEAD) * 128
                        _fetch_ahead(w1_data, row, k, cut.H, cut)
                        _fetch_ahead(w1_data, row + cut.SIZE, k, cut.H, cut)
                bar = ring.full.index(stage)
                mbarrier.wait(ring.empty.index(stage), phase)
                mbarrier.expect(bar, 2 * 128 * 128)
                box = ring.weights.index(2 * stage)
                tma.async_copy_global_to_shared(w1, [row, step * 128], bar, box)
                box = ring.weights.index(2 * stage + 1)
                tma.async_copy_global_to_shared(w1, [row + cut.SIZE, step * 128], bar, box)
                stage, phase = advance(stage, phase, cut.STAGES)
        ticket = _next_ticket(tickets, total)
    mbarrier.wait(ring.taken.index(slot), slot_phase)
    _post(ring, slot, -1, 0, 0, 0, 0)


@gluon.jit
def _load_box(data, scales, row, group, scale_row, token, bar, ring, box):
    tma.async_copy_global_to_shared(data, [row, group * 128], bar, ring.rows.index(box))
    tma.async_copy_global_to_shared(scales, [scale_row + group, token], bar, ring.scales.index(box))


@gluon.jit
def _load_step(
    data, scales, row, group, scale_row, token, stage, two, ring, cut, GROUPS: gl.constexpr
):
    """Rows and scales of one stage: GROUPS groups of columns, one or two parts of the tile."""
    bar = ring.full.index(stage)
    box: gl.constexpr = cut.TOKENS * 128 + cut.LANES * 4
    first = stage * cut.BOXES
    if cut.PARTS == 1:
        mbarrier.expect(bar, GROUPS * box)
    else:
        mbarrier.expect(bar, 2 * GROUPS * box, pred=two)
        mbarrier.expect(bar, GROUPS * box, pred=two == 0)
    for g in gl.static_range(GROUPS):
        at = first + g * cut.PARTS
        _load_box(data, scales, row, group + g, scale_row, token, bar, ring, at)
        if cut.PARTS == 2:
            if two:
                _load_box(
                    data, scales, row + cut.TOKENS, group + g, scale_row, token + cut.TOKENS,
                    bar, ring, at + 1,
                )  # fmt: skip


@gluon.jit
def load_rows(x, x_scales, act, act_scales, ready, ring, cut):
    """One warp: loads the rows of each tile; a down tile's once all its activations are there."""
    stage = 0
    phase = 1
    slot = 0
    slot_phase = 0
    expert, column, tile, count, split = take(ring, slot, slot_phase)
    while expert >= 0:
        give_back(ring, slot)
        slot, slot_phase = advance(slot, slot_phase, cut.SLOTS)
        token = tile * cut.TILE
        row = expert * cut.M + token
        two = count - token > cut.TOKENS
        if column >= cut.UP_COLUMNS:
            flag = ready + expert * cut.TILES_M + tile
            while load_acquire(flag) < 2 * cut.UP_COLUMNS:
                pass
            gl.thread_barrier()
            fence_proxies()
            # Every down tile of these rows has passed when the last one adds: then start over.
            if gl.atomic_add(flag, 1, sem="relaxed") == 2 * cut.UP_COLUMNS + cut.DOWN_COLUMNS - 1:
                gl.store(flag, 0)
            groups: gl.constexpr = 2 if cut.NARROW else 1
            scale_row = expert * (cut.SIZE // 128)
            for step in range(cut.DOWN_STEPS):
                mbarrier.wait(ring.empty.index(stage), phase)
                _load_step(
                    act,
                    act_scales,
                    row,
                    step * groups,
                    scale_row,
                    token,
                    stage,
                    two,
                    ring,
                    cut,
                    groups,
                )
                stage, phase = advance(stage, phase, cut.STAGES)
        else:
            scale_row = expert * (cut.H // 128)
            for step in range(split * cut.UP_STEPS, (split + 1) * cut.UP_STEPS):
                mbarrier.wait(ring.empty.index(stage), phase)
                _load_step(x, x_scales, row, step, scale_row, token, stage, two, ring, cut, 1)
                stage, phase = advance(stage, phase, cut.STAGES)
        expert, column, tile, count, split = take(ring, slot, slot_phase)


@gluon.jit
def load_block_scales(w1_scales, w2_scales, ring, cut):
    """One warp: copies the block scales of each tile's two halves into shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, cut.BLOCKS, layout=layout)
    slot = 0
    phase = 0
    expert, column, _, _, _ = take(ring, slot, phase)
    while expert >= 0:
        if column >= cut.UP_COLUMNS:
            block = expert * (cut.H // 128) + (column - cut.UP_COLUMNS) * (cut.DOWN_ROWS // 128)
            first = w2_scales + block * (cut.SIZE // 128)
            second = first + (0 if cut.NARROW else cut.SIZE // 128)
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
