"""Parts of K in the fused expert chain: sums are handed over through L2 to a tile's last part.

The last part has the highest ticket, so it waits for programs that run. Sums are added in the
same order in every launch.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from epdecode.kernels.expert_chain_shape import Cut
from epdecode.kernels.expert_chain_tiles import load_acquire


@gluon.jit
def _start(partials, part, split, cut: Cut, GROUP: gl.constexpr, mma: gl.constexpr):
    """Where a group's sums of a split go: a register of all its threads side by side."""
    wide: gl.constexpr = 128 if cut.ROWS_LEFT else cut.TOKENS
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    column = gl.arange(0, wide, layout=gl.SliceLayout(0, mma))
    row = row // 16 * 64 + row % 16 // 8 * 256 + row % 8 * 8
    column = column // 8 * 512 + column % 8
    place = part // cut.SPLITS * (cut.SPLITS - 1) + split
    at = partials + (place.to(gl.int64) * 2 + GROUP) * (128 * cut.TOKENS)
    return at + row[:, None] + column[None, :]


@gluon.jit
def hand_over(
    sums, partials, arrived, part, cut: Cut, GROUP: gl.constexpr, mma: gl.constexpr
) -> None:
    """Write this group's sums of one part of a tile, not its last, and say so."""
    at = _start(partials, part, part % cut.SPLITS, cut, GROUP, mma)
    gl.store(at, sums[0])
    if cut.TOKENS != 64:
        gl.store(at + 64 * cut.TOKENS, sums[1])
    gl.thread_barrier()
    gl.atomic_add(arrived + part // cut.SPLITS * 2 + GROUP, 1, sem="release")


@gluon.jit
def gather(
    sums, partials, arrived, part, cut: Cut, GROUP: gl.constexpr, mma: gl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The sums of the whole tile, once this group's of all other parts are there."""
    counter = arrived + part // cut.SPLITS * 2 + GROUP
    while load_acquire(counter) < cut.SPLITS - 1:
        pass
    gl.thread_barrier()
    gl.store(counter, 0)
    a, b = sums
    for split in gl.static_range(cut.SPLITS - 1):
        at = _start(partials, part, split, cut, GROUP, mma)
        a += gl.load(at, cache_modifier=".cg")
        if cut.TOKENS != 64:
            b += gl.load(at + 64 * cut.TOKENS, cache_modifier=".cg")
    return a, b
