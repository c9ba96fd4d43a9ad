"""Math of the fused expert chain for tiles of 64 and 128 rows: rows are the left operand.

Products are [64 rows, 128 weight rows], so a thread scales with two row scales where weights on
the left need one per eight columns, and results come out as they are stored. A box's 128 weight
rows of a gate-up tile are 64 of gate and the 64 of up that belong to them. Of 64 rows each group
takes one box of weights; of 128 each has its own rows and both boxes.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from epdecode.kernels.expert_chain_shape import Cut, Ring, block_scale, row_scales
from epdecode.kernels.quant_math import group_scale, silu_mul


@gluon.jit
def _add_product(total, ring: Ring, rows, weights, factor, mma: gl.constexpr):
    """total + (a box of rows x a box of weights) * factor."""
    zeros = gl.zeros([64, 128], gl.float32, layout=mma)
    right = ring.weights.index(weights).permute((1, 0))
    product = warpgroup_mma(ring.rows.index(rows), right, zeros, use_acc=False, is_async=True)
    # The total waits too, or the compiler spills it.
    product, total = warpgroup_mma_wait(0, deps=[product, total])
    return total + product * factor


@gluon.jit
def _factor(of_rows, first, second, box: gl.constexpr, IS_UP: gl.constexpr, mma: gl.constexpr):
    """Row scales x block scales: gate's and up's side by side, or the box's own."""
    if IS_UP:
        column = gl.arange(0, 128, layout=gl.SliceLayout(0, mma))
        return of_rows[:, None] * gl.where(column < 64, first, second)[None, :]
    else:  # noqa: RET505, the compiler must not see both returns
        return (of_rows * (first if box == 0 else second))[:, None]


@gluon.jit
def add_rows_left(
    a, b, ring: Ring, stage, slot, step, cut: Cut,
    IS_UP: gl.constexpr, GROUP: gl.constexpr, mma: gl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """One step's products, added to this group's sums [64, 128], with 128 rows of both boxes."""
    layout: gl.constexpr = gl.SliceLayout(1, mma)
    first = block_scale(ring, 2 * slot, step, cut)
    second = block_scale(ring, 2 * slot + 1, step, cut)
    if cut.BOXES_M == 1:
        factor = _factor(row_scales(ring, stage, cut, layout), first, second, GROUP, IS_UP, mma)
        a = _add_product(a, ring, stage, 2 * stage + GROUP, factor, mma)
    else:
        box = 2 * stage + GROUP
        of_rows = row_scales(ring, box, cut, layout)
        factor = _factor(of_rows, first, second, 0, IS_UP, mma)
        a = _add_product(a, ring, box, 2 * stage, factor, mma)
        factor = _factor(of_rows, first, second, 1, IS_UP, mma)
        b = _add_product(b, ring, box, 2 * stage + 1, factor, mma)
    return a, b


@gluon.jit
def _swiglu(sums, half: gl.constexpr):
    """[64, gate 64 | up 64] -> [64, 64]."""
    gate, up = gl.split(sums.reshape([64, 2, 64]).permute((0, 2, 1)))
    return gl.convert_layout(silu_mul(gate, up), half)


@gluon.jit
def _put(base, values, left, stride: gl.constexpr, WIDTH: gl.constexpr):
    """values [64, WIDTH] to ``base`` (token 0, column 0), the first ``left`` tokens."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    values = gl.convert_layout(values, wide)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, wide))
    gl.store(base + row[:, None] * stride + column[None, :], values, mask=(row < left)[:, None])


@gluon.jit
def _put_quantised(base, values, factor, left, cut: Cut):
    values = tl.clamp(values * factor[:, None], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    _put(base, values.to(gl.float8e4nv), left, cut.SIZE, 64)


@gluon.jit
def activate_rows_left(
    a, b, act, act_scales, expert, token, count, column, turn, ring: Ring, cut: Cut,
    GROUP: gl.constexpr,
) -> None:  # fmt: skip
    """silu(gate) * up, quantised over the tile's 128 columns; of 64 rows 64 columns are here."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    layout: gl.constexpr = gl.SliceLayout(1, half)
    first = _swiglu(a, half)
    second = first
    largest = gl.max(gl.abs(first), 1)
    if cut.BOXES_M == 1:
        place = turn % 2 * 2
        ring.largest.index(place + GROUP).store(largest)
        gl.thread_barrier()
        mbarrier.arrive(ring.met, count=1)
        mbarrier.wait(ring.met, turn % 2)
        largest = gl.maximum(largest, ring.largest.index(place + 1 - GROUP).load(layout))
    else:
        second = _swiglu(b, half)
        largest = gl.maximum(largest, gl.max(gl.abs(second), 1))
    scale, factor = group_scale(largest, False)
    if (cut.BOXES_M == 2) | (GROUP == 0):
        at = token + gl.arange(0, 64, layout=layout)
        group = expert.to(gl.int64) * (cut.SIZE // 128) + column
        gl.store(act_scales + group * cut.M + at, scale, mask=at < count)
    base = act + (expert.to(gl.int64) * cut.M + token) * cut.SIZE + column * 128
    if cut.BOXES_M == 1:
        _put_quantised(base + 64 * GROUP, first, factor, count - token, cut)
    else:
        _put_quantised(base, first, factor, count - token, cut)
        _put_quantised(base + 64, second, factor, count - token, cut)


@gluon.jit
def write_rows_left(a, b, out, expert, token, count, column, cut: Cut, GROUP: gl.constexpr) -> None:
    """A down tile's sums to ``out``."""
    base = out + (expert.to(gl.int64) * cut.M + token) * cut.H + column * 256
    if cut.BOXES_M == 1:
        _put(base + 128 * GROUP, a.to(gl.bfloat16), count - token, cut.H, 128)
    else:
        _put(base, a.to(gl.bfloat16), count - token, cut.H, 128)
        _put(base + 128, b.to(gl.bfloat16), count - token, cut.H, 128)
