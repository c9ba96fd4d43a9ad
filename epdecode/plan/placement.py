"""Which rank holds which experts: replicas of the busy ones, packed so that ranks get even loads.

Pure: numbers in, numbers out. A placement is a tuple of logical expert ids, one a slot; slot p (the
physical id that transports use) is on rank p // (slots / ranks).

The method is the usual greedy one (DeepSeek's EPLB describes it): give the next replica to the
expert whose replicas are busiest, then put pieces, largest first, where the load is least. Over
several nodes it first packs the router's groups onto nodes and then works within each, so that a
token whose router picks few groups stays on few nodes; loads of nodes are then less even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

Slots = tuple[int, ...]


@dataclass(slots=True)
class _Bin:
    """Something that takes a fixed number of pieces."""

    room: int
    load: float = 0.0
    items: list[int] = field(default_factory=list)


def contiguous(num_experts: int) -> Slots:
    """Rank r holds the r-th block."""
    return tuple(range(num_experts))


def balanced(
    load: Sequence[float],
    redundant: int,
    num_ranks: int,
    *,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> Slots:
    """Slots for len(load) experts and ``redundant`` replicas; no rank holds an expert twice.

    load: of each expert, only ratios count. num_groups: the router's groups of consecutive
    experts, each kept within a node where there are several. What ``redundant_problem`` and
    ``node_problem`` refuse must not come here.
    """
    experts = range(len(load))
    if num_nodes == 1:
        return _fill_ranks(load, experts, redundant, num_ranks)
    size = len(load) // num_groups
    members = [experts[group * size : (group + 1) * size] for group in range(num_groups)]
    sums = [sum(load[expert] for expert in group) for group in members]
    nodes = _pack(sums, range(num_groups), [num_groups // num_nodes] * num_nodes)
    slots: Slots = ()
    for groups in nodes:
        here = [expert for group in sorted(groups) for expert in members[group]]
        slots += _fill_ranks(load, here, redundant // num_nodes, num_ranks // num_nodes)
    return slots


def redundant_problem(num_experts: int, redundant: int, num_ranks: int) -> str | None:
    """What is wrong with that many replicas, and the nearest number that is right."""
    most = num_experts * (num_ranks - 1)
    legal = [
        count
        for count in range(min(most, redundant + 2 * num_ranks) + 1)
        if (num_experts + count) % num_ranks == 0
    ]
    if redundant in legal:
        return None
    near = sorted(sorted(legal, key=lambda count: abs(count - redundant))[:2])
    return (
        f"{num_experts} experts + {redundant} replicas on {num_ranks} rank(s); accepted: a number "
        f"that makes the sum divide over the ranks, at most one replica of an expert a rank; "
        f"nearest: {', '.join(map(str, near)) or 'none'}"
    )


def node_problem(num_groups: int, redundant: int, num_ranks: int, num_nodes: int) -> str | None:
    """What keeps groups of experts from being placed node by node."""
    for what, count in (
        ("groups of the router", num_groups),
        ("redundant experts", redundant),
        ("ranks", num_ranks),
    ):
        if count % num_nodes:
            return f"{count} {what} do not divide over {num_nodes} nodes"
    return None


def num_replicas(slots: Sequence[int], num_experts: int) -> list[int]:
    """Slots that hold each expert."""
    counts = [0] * num_experts
    for expert in slots:
        counts[expert] += 1
    return counts


def rank_loads(slots: Sequence[int], load: Sequence[float], num_ranks: int) -> list[float]:
    """Each rank's load when replicas share their expert's evenly."""
    replicas = num_replicas(slots, len(load))
    size = len(slots) // num_ranks
    return [
        sum(load[expert] / replicas[expert] for expert in slots[rank * size : (rank + 1) * size])
        for rank in range(num_ranks)
    ]


def imbalance(loads: Sequence[float]) -> float:
    """Largest over mean; 1 where there is no load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total > 0 else 1.0


def replica_table(slots: Sequence[int], num_experts: int, rows: int, rank: int) -> list[list[int]]:
    """[rows][num_experts + 1]: the slot that token row t of a rank sends each expert's copy to.

    Rows take an expert's replicas by turns, and ranks begin with different ones. The last column
    is -1: id -1, counted from the end, stays -1.
    """
    places: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(slots):
        places[expert].append(slot)
    return [[*(own[(row + rank) % len(own)] for own in places), -1] for row in range(rows)]


def first_slots(slots: Sequence[int]) -> set[int]:
    """One slot of each expert, the first: together they hold every expert once."""
    first: dict[int, int] = {}
    for slot, expert in enumerate(slots):
        first.setdefault(expert, slot)
    return set(first.values())


def _fill_ranks(
    load: Sequence[float], experts: Sequence[int], redundant: int, num_ranks: int
) -> Slots:
    """Replicate and pack these experts on these ranks; within a rank by ascending id."""
    counts = _replicate(load, experts, redundant, num_ranks)
    pieces = [expert for expert in experts for _ in range(counts[expert])]
    weights = [load[expert] / counts[expert] for expert in pieces]
    size = len(pieces) // num_ranks
    ranks = _pack(weights, pieces, [size] * num_ranks)
    return tuple(expert for rank in ranks for expert in sorted(rank))


def _replicate(
    load: Sequence[float], experts: Sequence[int], redundant: int, most: int
) -> dict[int, int]:
    """Replicas of each expert, at most ``most``."""
    counts = dict.fromkeys(experts, 1)
    busiest = [(-load[expert], expert) for expert in experts] if most > 1 else []
    busiest.sort()
    for _ in range(redundant):
        _, expert = heappop(busiest)
        counts[expert] += 1
        if counts[expert] < most:
            heappush(busiest, (-load[expert] / counts[expert], expert))
    return counts


def _pack(weights: Sequence[float], items: Sequence[int], rooms: Sequence[int]) -> list[list[int]]:
    """Items into bins of fixed room, largest first into the least loaded; none twice in a bin."""
    bins = [_Bin(room) for room in rooms]
    order = sorted(range(len(items)), key=lambda index: (-weights[index], items[index]))
    weight_of = dict(zip(items, weights, strict=True))
    for index in order:
        item, weight = items[index], weights[index]
        free = [one for one in bins if len(one.items) < one.room]
        fits = [one for one in free if item not in one.items]
        if not fits:
            fits = [_make_room(bins, free[0], item, weight_of)]
        target = min(fits, key=lambda one: one.load)
        target.items.append(item)
        target.load += weight
    return [one.items for one in bins]


def _make_room(bins: Sequence[_Bin], free: _Bin, item: int, weight_of: dict[int, float]) -> _Bin:
    """Move an item from a full bin without ``item`` into the free one, which has it already.

    There is one: a full bin holds more different items than the free bin, so one that it lacks.
    """
    source, moved = min(
        ((one, other) for one in bins if item not in one.items for other in one.items
         if other not in free.items),
        key=lambda pair: abs(weight_of[pair[1]] - weight_of[item]),
    )  # fmt: skip
    source.items.remove(moved)
    source.load -= weight_of[moved]
    free.items.append(moved)
    free.load += weight_of[moved]
    return source
