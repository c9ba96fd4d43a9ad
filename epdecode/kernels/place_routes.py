"""Where each route's row goes when received rows are sorted by local expert.

Two launches, neither waits for the host: counts per slice of routes, then places, labels and
totals. Rows keep their order inside an expert, so the result is the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epdecode.kernels.checks import check
from epdecode.kernels.launch import early_launch, launch_options, power_of_two

MOST = 128
"""Most programs that share the routes, and most routes a program ranks at a time."""


def _split(num_experts: int) -> int:
    """Programs, and routes at a time: a table of either by experts must fit the registers."""
    return MOST if num_experts <= 64 else MOST // 4


@dataclass(frozen=True, slots=True)
class Places:
    """Where routes went; R is the worst case of packed rows, see ``most_packed_rows``.

    labels: int32 [R], local expert, -1 in gaps and the tail. counts: int32 [E].
    sources: int32 [R], the received row that each labelled packed row is a copy of.
    row_map: int32 [R0, K], the packed row of route (row, slot), -1 where it has no expert.
    num_received: int32 [1], one past the last received row that has an expert.
    scratch: int32 [slices, E + 1], counts of each slice of routes and its last real one.
    """

    labels: torch.Tensor
    sources: torch.Tensor
    counts: torch.Tensor
    row_map: torch.Tensor
    num_received: torch.Tensor
    scratch: torch.Tensor


@triton.jit
def _count_kernel(
    topk_ids,
    scratch,
    num_routes,
    num_experts,
    per_slice,
    STEP: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slice = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    count = tl.zeros((EXPERTS,), tl.int32)
    last = tl.zeros((), tl.int32)
    start = slice * per_slice
    end = tl.minimum(start + per_slice, num_routes)
    while start < end:
        route = start + tl.arange(0, STEP)
        id = tl.load(topk_ids + route, mask=route < end, other=-1)
        good = (id >= 0) & (id < num_experts)
        count += tl.sum((good[:, None] & (id[:, None] == expert[None, :])).to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(good, route + 1, 0), 0))
        start += STEP
    mine = scratch + slice * (num_experts + 1)
    tl.store(mine + expert, count, mask=expert < num_experts)
    tl.store(mine + num_experts, last)


@triton.jit
def _place_kernel(
    topk_ids,
    scratch,
    row_map,
    labels,
    sources,
    counts,
    num_received,
    num_routes,
    num_experts,
    per_slice,
    num_rows,
    top_k,
    num_slices,
    STEP: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLICES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    expert = tl.arange(0, EXPERTS)
    slice = tl.arange(0, SLICES)
    known = (slice < num_slices)[:, None] & (expert < num_experts)[None, :]
    slices = scratch + slice * (num_experts + 1)
    table = tl.load(slices[:, None] + expert[None, :], mask=known, other=0)
    count = tl.sum(table, 0)
    blocks = (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    first = tl.cumsum(blocks, 0) - blocks
    at = first + tl.sum(tl.where((slice < program)[:, None], table, 0), 0)

    lane = tl.arange(0, STEP)
    start = program * per_slice
    end = tl.minimum(start + per_slice, num_routes)
    while start < end:
        route = start + lane
        id = tl.load(topk_ids + route, mask=route < end, other=-1)
        mine = ((id >= 0) & (id < num_experts))[:, None] & (id[:, None] == expert[None, :])
        hit = mine.to(tl.int32)
        # The number of earlier routes of this step with the same expert.
        earlier = tl.cumsum(hit, 0) - hit
        position = tl.sum(tl.where(mine, at[None, :] + earlier, 0), 1)
        # Ids repeated in a row could need more rows than the worst case of distinct ones has.
        fits = (tl.sum(hit, 1) > 0) & (position < num_rows)
        position = tl.where(fits, position, -1)
        tl.store(row_map + route, position, mask=route < end)
        tl.store(sources + position, route // top_k, mask=fits)
        at += tl.sum(hit, 0)
        start += STEP

    row = program * STEP
    while row < num_rows:
        place = row + lane
        inside = (place[:, None] >= first[None, :]) & (place[:, None] < (first + count)[None, :])
        label = tl.sum(tl.where(inside, expert[None, :] + 1, 0), 1) - 1
        tl.store(labels + place, label, mask=place < num_rows)
        row += programs * STEP
    if program == 0:
        tl.store(counts + expert, count, mask=expert < num_experts)
        last = tl.load(slices + num_experts, mask=slice < num_slices, other=0)
        tl.store(num_received, (tl.max(last, 0) + top_k - 1) // top_k)


def most_packed_rows(received: int, top_k: int, num_experts: int, alignment: int) -> int:
    """Rows that ``received`` rows can become at worst: every slot taken, every block padded."""
    routes = received * min(top_k, num_experts)
    full = routes + min(num_experts, routes) * (alignment - 1)
    return -(-full // alignment) * alignment


def empty_places(
    received: int, top_k: int, num_experts: int, num_rows: int, device: torch.device | str
) -> Places:
    """Buffers for ``received`` rows of ``top_k`` routes that become at most ``num_rows``."""
    split = _split(num_experts)
    slices = max(1, min(split, -(-received * top_k // split)))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Places(
        labels=ints(num_rows),
        sources=ints(num_rows),
        counts=ints(num_experts),
        row_map=ints(received, top_k),
        num_received=ints(1),
        scratch=ints(slices, num_experts + 1),
    )


def place_routes(topk_ids: torch.Tensor, alignment: int, out: Places) -> Places:
    """topk_ids int64 [R0, K], local expert ids, anything outside [0, E) = no expert -> ``out``.

    Each expert's rows start at a multiple of ``alignment``. Raises ConfigError for shapes, types.
    """
    _check(topk_ids, alignment, out)
    routes, slices = topk_ids.numel(), out.scratch.shape[0]
    num_experts = out.counts.numel()
    step = _split(num_experts)
    per_slice = max(1, -(-routes // (slices * step))) * step
    experts = power_of_two(num_experts)
    _count_kernel[(slices,)](
        topk_ids,
        out.scratch,
        routes,
        num_experts,
        per_slice,
        STEP=step,
        EXPERTS=experts,
        PDL=early_launch(topk_ids.device),
        num_warps=4,
        **launch_options(topk_ids.device),
    )
    num_rows = out.labels.numel()
    # Programs beyond the slices only write labels, of which there are more than routes.
    programs = max(slices, min(MOST, -(-num_rows // step)))
    _place_kernel[(programs,)](
        topk_ids,
        out.scratch,
        out.row_map,
        out.labels,
        out.sources,
        out.counts,
        out.num_received,
        routes,
        num_experts,
        per_slice,
        num_rows,
        topk_ids.shape[1],
        slices,
        STEP=step,
        EXPERTS=experts,
        SLICES=power_of_two(slices),
        ALIGNMENT=alignment,
        PDL=early_launch(topk_ids.device),
        num_warps=4,
        **launch_options(topk_ids.device),
    )
    return out


def place_routes_ref(topk_ids: torch.Tensor, alignment: int, out: Places) -> Places:
    """``place_routes`` in plain torch; synchronises with the host."""
    _check(topk_ids, alignment, out)
    num_experts, num_rows = out.counts.numel(), out.labels.numel()
    ids = topk_ids.flatten()
    good = (ids >= 0) & (ids < num_experts)
    route = good.nonzero().squeeze(1)
    expert = ids[route]
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=num_experts)
    blocks = (counts + alignment - 1) // alignment * alignment
    shift = (blocks.cumsum(0) - blocks) - (counts.cumsum(0) - counts)
    place = torch.arange(len(order), device=ids.device) + shift[expert[order]]
    out.row_map.fill_(-1).flatten()[route[order]] = torch.where(place < num_rows, place, -1).int()
    out.labels.fill_(-1)
    out.labels[place[place < num_rows]] = expert[order][place < num_rows].int()
    out.sources[place[place < num_rows]] = (route[order] // topk_ids.shape[1])[
        place < num_rows
    ].int()
    out.counts.copy_(counts)
    rows_used = good.view(topk_ids.shape).any(1).nonzero()
    out.num_received.fill_(int(rows_used.max()) + 1 if rows_used.numel() else 0)
    return out


def _check(topk_ids: torch.Tensor, alignment: int, out: Places) -> None:
    op = "place_routes"
    check(topk_ids.dim() == 2, op, "topk_ids' rank", topk_ids.dim(), "2: [R0, K]")
    check(topk_ids.dtype == torch.int64, op, "topk_ids' dtype", topk_ids.dtype, "int64")
    check(topk_ids.is_contiguous(), op, "topk_ids' stride", topk_ids.stride(), "contiguous")
    received, top_k = topk_ids.shape
    shape = tuple(out.row_map.shape)
    check(shape == (received, top_k), op, "row_map's shape", shape, str((received, top_k)))
    check(alignment > 0, op, "alignment", alignment, "1 or more rows")
    need = most_packed_rows(received, top_k, out.counts.numel(), alignment)
    got = out.labels.numel()
    check(got >= need, op, "the number of packed rows", got, f"{need} or more (worst case)")
