"""Tiles of the fused expert chain: whose turn it is, which tile a ticket is, how warps are told.

No future annotations here: the compiler reads the annotations of aggregates as types.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from epdecode.kernels.expert_chain_shape import Cut, Ring


@gluon.jit
def load_acquire(pointer) -> tl.tensor:
    """An int32 that other programs release: what they wrote before is there."""
    asm: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    address = pointer.to(gl.uint64)
    return gl.inline_asm_elementwise(asm, "=r,l", [address], gl.int32, is_pure=False, pack=1)


@gluon.jit
def advance(index, phase, LENGTH: gl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The next place in a ring of LENGTH and its barriers' parity."""
    wrapped = index + 1 == LENGTH
    return gl.where(wrapped, 0, index + 1), phase ^ wrapped.to(gl.int32)


@gluon.jit
def on_second_of_pair() -> tl.tensor:
    """Whether this SM is the second of the two that share a way to L2."""
    asm: gl.constexpr = "mov.u32 $0, %smid;"
    return gl.inline_asm_elementwise(asm, "=r", [], gl.int32, is_pure=True, pack=1) % 2 == 1


@gluon.jit
def let_first_of_pairs_begin(tickets, up_tiles) -> None:
    """Wait until half the SMs have a gate-up tile, or all tiles are taken; never for long.

    Where tiles are few, two on SMs that share a way to L2 take a third longer than one on each.
    """
    enough = gl.minimum(up_tiles, gl.num_programs(0) // 2)
    tries = 0
    while (load_acquire(tickets) < enough) & (tries < 16):
        tries += 1


@gluon.jit
def tile_of(
    index, columns, rows, ends, experts
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(expert, its rows, its token tiles, those of experts before it, column, token tile).

    ends: token tiles of all experts up to each. An expert's tiles are in the order of columns,
    then token tiles.
    """
    before = ends * columns <= index
    expert = gl.sum(before.to(gl.int32), 0)
    start = gl.max(gl.where(before, ends, 0), 0)
    mine = gl.sum(gl.where(experts == expert, ends, 0), 0) - start
    count = gl.sum(gl.where(experts == expert, rows, 0), 0)
    index -= start * columns
    return expert, count, mine, start, index // mine, index % mine


@gluon.jit
def post(ring: Ring, slot, expert, column, tile, count, part) -> None:
    """Describe the next tile to the other warps, in the words of ``take``."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.words.index(5 * slot).store(gl.full([1], expert, gl.int32, layout=one))
    ring.words.index(5 * slot + 1).store(gl.full([1], column, gl.int32, layout=one))
    ring.words.index(5 * slot + 2).store(gl.full([1], tile, gl.int32, layout=one))
    ring.words.index(5 * slot + 3).store(gl.full([1], count, gl.int32, layout=one))
    ring.words.index(5 * slot + 4).store(gl.full([1], part, gl.int32, layout=one))
    mbarrier.arrive(ring.posted.index(slot), count=1)


@gluon.jit
def take(ring: Ring, slot, phase) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(expert, column, token tile, rows of the expert, part) of the next tile; expert -1 = no more.

    Columns count on from the gate-up columns into the down columns. Parts of gate-up tiles count
    through all tiles, SPLITS each; -1 = the whole tile.
    """
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(ring.posted.index(slot), phase)
    expert = gl.max(ring.words.index(5 * slot).load(one), 0)
    column = gl.max(ring.words.index(5 * slot + 1).load(one), 0)
    tile = gl.max(ring.words.index(5 * slot + 2).load(one), 0)
    count = gl.max(ring.words.index(5 * slot + 3).load(one), 0)
    part = gl.max(ring.words.index(5 * slot + 4).load(one), 0)
    return expert, column, tile, count, part


@gluon.jit
def up_steps(part, cut: Cut) -> tuple[tl.tensor, tl.tensor]:
    """(first, end) of the K steps of a gate-up tile's part."""
    if cut.SPLITS == 1:
        return 0, cut.UP_STEPS
    else:  # noqa: RET505, the compiler must not see both returns
        each: gl.constexpr = cut.UP_STEPS // cut.SPLITS
        whole = part < 0
        first = gl.where(whole, 0, part % cut.SPLITS * each)
        return first, gl.where(whole, cut.UP_STEPS, first + each)


@gluon.jit
def give_back(ring: Ring, slot) -> None:
    """Say that this partition needs the slot's words and block scales no more."""
    gl.thread_barrier()
    mbarrier.arrive(ring.taken.index(slot), count=1)
