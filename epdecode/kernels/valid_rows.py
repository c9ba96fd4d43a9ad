"""Where the valid rows are: from per-expert counts on the device to row offsets, in the kernel.

Two layouts of the same rows. ALIGNMENT = 0: expert e owns rows [e * capacity, (e + 1) * capacity)
(the masked GEMM's). ALIGNMENT > 0: blocks follow one another, each starting at a multiple of
ALIGNMENT (the contiguous GEMM's).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def row_ends(counts, num_experts, capacity, EXPERTS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(count, inclusive running sum of it) per expert, int32 [EXPERTS], counts cut to capacity."""
    lane = tl.arange(0, EXPERTS)
    count = tl.load(counts + lane, mask=lane < num_experts, other=0)
    count = tl.maximum(tl.minimum(count, capacity), 0)
    return count, tl.cumsum(count, 0)


@triton.jit
def find_row(
    valid_row,
    count,
    ends,
    capacity,
    scale_expert_stride,
    scale_row_stride,
    ALIGNMENT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Valid row number, experts in order -> (row in the whole tensor, where its scales start)."""
    before = ends <= valid_row
    inner = valid_row - tl.sum(tl.where(before, count, 0), 0)
    if ALIGNMENT:
        blocks = (count + ALIGNMENT - 1) // ALIGNMENT
        row = tl.sum(tl.where(before, blocks, 0), 0).to(tl.int64) * ALIGNMENT + inner
        return row, row * scale_row_stride
    else:  # noqa: RET505, the compiler must not see both returns
        expert = tl.sum(before.to(tl.int32), 0).to(tl.int64)
        return expert * capacity + inner, expert * scale_expert_stride + inner * scale_row_stride


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
