"""Where the valid rows are: from per-expert counts on the device to row offsets, in the kernel.

Two layouts of the same rows. ALIGNMENT = 0: expert e owns rows [e * capacity, (e + 1) * capacity)
(the masked GEMM's). ALIGNMENT > 0: blocks follow one another, each starting at a multiple of
ALIGNMENT (the contiguous GEMM's).

Experts are held 32 at a time, one a lane, in every warp: sums over them are single warp
instructions, and no warp of a program ever waits for another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LANES = 32


@triton.jit
def expert_rows(
    counts, num_experts, capacity, CHUNKS: tl.constexpr
) -> tuple[tl.tuple, tl.tuple, tl.tensor]:
    """(count, inclusive running sum of it, total); the first two as CHUNKS blocks of 32 experts.

    Counts are cut to [0, capacity].
    """
    lane = tl.arange(0, 32)
    count = ()
    ends = ()
    total = 0
    for chunk in tl.static_range(CHUNKS):
        expert = chunk * 32 + lane
        rows = tl.load(counts + expert, mask=expert < num_experts, other=0)
        rows = tl.maximum(tl.minimum(rows, capacity), 0)
        count = count + (rows,)  # type: ignore[assignment]
        ends = ends + (tl.cumsum(rows, 0) + total,)  # type: ignore[assignment]
        total += tl.sum(rows, 0)
    return count, ends, total


@triton.jit
def find_row(
    valid_row,
    count,
    ends,
    capacity,
    scale_expert_stride,
    scale_row_stride,
    ALIGNMENT: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Valid row number, experts in order -> (row in the whole tensor, where its scales start)."""
    experts = tl.zeros((32,), tl.int32)
    rows = tl.zeros((32,), tl.int32)
    for chunk in tl.static_range(CHUNKS):
        before = ends[chunk] <= valid_row
        rows += tl.where(before, count[chunk], 0)
        if ALIGNMENT:
            blocks = (count[chunk] + ALIGNMENT - 1) // ALIGNMENT
            experts += tl.where(before, blocks, 0)
        else:
            experts += before.to(tl.int32)
    inner = valid_row - tl.sum(rows, 0)
    first = tl.sum(experts, 0).to(tl.int64)
    if ALIGNMENT:
        row = first * ALIGNMENT + inner
        return row, row * scale_row_stride
    else:  # noqa: RET505, the compiler must not see both returns
        return first * capacity + inner, first * scale_expert_stride + inner * scale_row_stride


@triton.jit
def find_groups(
    item,
    count,
    ends,
    capacity,
    scale_expert_stride,
    scale_row_stride,
    ALIGNMENT: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(row, start of its scales, group in it) of the TILE groups of piece ``item``.

    Groups of all valid rows are numbered row after row, WIDTH a row, and cut into pieces of TILE:
    a piece may end one row and begin the next, so that none is partly idle.
    """
    ROWS: tl.constexpr = (
        TILE // WIDTH if TILE % WIDTH == 0 else 1 if WIDTH % TILE == 0 else TILE // WIDTH + 2
    )
    flat = item * TILE + tl.arange(0, TILE)
    first = item * TILE // WIDTH
    row = tl.zeros((TILE,), tl.int64)
    scale_row = tl.zeros((TILE,), tl.int64)
    for step in tl.static_range(ROWS):
        at, scale_at = find_row(
            first + step,
            count,
            ends,
            capacity,
            scale_expert_stride,
            scale_row_stride,
            ALIGNMENT,
            CHUNKS,
        )
        mine = flat // WIDTH == first + step
        row = tl.where(mine, at, row)
        scale_row = tl.where(mine, scale_at, scale_row)
    return row, scale_row, flat % WIDTH


def valid_rows_ref(
    counts: torch.Tensor, capacity: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row, expert, inner) int64 of every valid row, experts in order; synchronises with the host.

    inner is the row within its expert's block.
    """
    counts = counts.long().clamp(0, capacity)
    lanes = torch.arange(capacity, device=counts.device)
    expert, inner = (lanes[None, :] < counts[:, None]).nonzero(as_tuple=True)
    if alignment == 0:
        return expert * capacity + inner, expert, inner
    blocks = (counts + alignment - 1) // alignment * alignment
    return (blocks.cumsum(0) - blocks)[expert] + inner, expert, inner
