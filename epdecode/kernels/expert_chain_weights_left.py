"""Math of the fused expert chain for tiles of 16 and 32 rows: weights are the left operand.

A group has 64 of each box's 128 weight rows: of gate and of the up rows that belong to them, so
SwiGLU happens in registers; a row is a column of the products.
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
def _product(ring: Ring, weights, rows, cut: Cut, GROUP: gl.constexpr, mma: gl.constexpr):
    """Start this group's half of a box of weights x a box of rows."""
    zeros = gl.zeros([64, cut.TOKENS], gl.float32, layout=mma)
    left = ring.weights.index(weights).slice(64 * GROUP, 64)
    right = ring.rows.index(rows).permute((1, 0))
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)


@gluon.jit
def add_weights_left(
    a, b, ring: Ring, stage, slot, step, cut: Cut,
    IS_UP: gl.constexpr, GROUP: gl.constexpr, mma: gl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """One step's products of both boxes of weights, added to their sums [64, TOKENS]."""
    layout: gl.constexpr = gl.SliceLayout(0, mma)
    groups: gl.constexpr = 1 if IS_UP else cut.DOWN_GROUPS
    box = stage * cut.BOXES
    scale_a = block_scale(ring, 2 * slot, step * groups, cut)
    scale_b = block_scale(ring, 2 * slot + 1, step * groups + groups - 1, cut)
    product_a = _product(ring, 2 * stage, box, cut, GROUP, mma)
    product_b = _product(ring, 2 * stage + 1, box + groups - 1, cut, GROUP, mma)
    of_rows = row_scales(ring, box, cut, layout)
    product_a = warpgroup_mma_wait(1, deps=[product_a])
    a += product_a * (of_rows * scale_a)[None, :]
    if groups == 2:
        of_rows = row_scales(ring, box + 1, cut, layout)
    product_b = warpgroup_mma_wait(0, deps=[product_b])
    b += product_b * (of_rows * scale_b)[None, :]
    return a, b


@gluon.jit
def _store(base, values, left, stride: gl.constexpr, cut: Cut):
    """values [64, TOKENS] transposed to ``base`` (token 0, column 0), the first ``left`` tokens."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    values = gl.convert_layout(values.permute((1, 0)), wide)
    row = gl.arange(0, cut.TOKENS, layout=gl.SliceLayout(1, wide))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, wide))
    gl.store(base + row[:, None] * stride + column[None, :], values, mask=(row < left)[:, None])


@gluon.jit
def activate_weights_left(
    gate, up, act, act_scales, expert, token, count, column, turn, ring: Ring, cut: Cut,
    GROUP: gl.constexpr, mma: gl.constexpr,
) -> None:  # fmt: skip
    """silu(gate) * up, quantised over the tile's 128 columns, 64 here and 64 in the other group.

    Divisions cost more than the way through shared memory: each thread takes one token's.
    """
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    values = silu_mul(gate, up)
    place = turn % 2 * 2
    ring.largest.index(place + GROUP).store(gl.max(gl.abs(values), 0))
    gl.thread_barrier()
    mbarrier.arrive(ring.met, count=1)
    mbarrier.wait(ring.met, turn % 2)
    mine = ring.largest.index(place).load(one)
    scale, factor = group_scale(gl.maximum(mine, ring.largest.index(place + 1).load(one)), False)
    if GROUP == 0:
        at = token + gl.arange(0, cut.TOKENS, layout=one)
        group = expert.to(gl.int64) * (cut.SIZE // 128) + column
        gl.store(act_scales + group * cut.M + at, scale, mask=at < count)
    factor = gl.convert_layout(factor, gl.SliceLayout(0, mma))
    values = tl.clamp(values * factor[None, :], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    base = act + (expert.to(gl.int64) * cut.M + token) * cut.SIZE + column * 128 + 64 * GROUP
    _store(base, values.to(gl.float8e4nv), count - token, cut.SIZE, cut)


@gluon.jit
def write_weights_left(
    a, b, out, expert, token, count, column, cut: Cut, GROUP: gl.constexpr
) -> None:
    """A down tile's sums to ``out``; with two K groups a step they are halves of one sum."""
    base = out + (expert.to(gl.int64) * cut.M + token) * cut.H + column * cut.DOWN_ROWS + 64 * GROUP
    if cut.NARROW:
        _store(base, (a + b).to(gl.bfloat16), count - token, cut.H, cut)
    else:
        _store(base, a.to(gl.bfloat16), count - token, cut.H, cut)
        _store(base + 128, b.to(gl.bfloat16), count - token, cut.H, cut)
