"""Placement of the loop's layers, from the load that each expert is expected to get. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from epdecode.config import Config
from epdecode.models import ModelShape
from epdecode.models.layers import LoopLayer
from epdecode.plan.placement import (
    Slots,
    balanced,
    contiguous,
    first_slots,
    imbalance,
    node_problem,
    rank_loads,
    redundant_problem,
)
from epdecode.routing.load import Recorded, expected_load


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Where experts are; physical ids (slots) are for transports, users see logical ids."""

    kind: str
    redundant: int
    """Replicas in a layer."""
    slots: tuple[Slots, ...]
    """Per layer of the loop, the logical expert of each slot; () = contiguous."""
    load: str
    """Where the expected load came from."""
    rank_imbalance: float
    """Expected: rows of the busiest rank over the mean, mean over layers."""
    rank_imbalance_contiguous: float
    """The same if rank r held the r-th block, and no replicas."""

    def local(self, layer: int, rank: int, num_local: int) -> Sequence[int]:
        """Logical ids in a rank's slots, in the order of the slots."""
        block = range(rank * num_local, (rank + 1) * num_local)
        return block if not self.slots else [self.slots[layer][slot] for slot in block]

    def first_local(self, layer: int, rank: int, num_local: int) -> list[tuple[int, int]]:
        """(local slot, logical id) of those whose first replica is here: over all ranks every
        expert once."""
        block = range(rank * num_local, (rank + 1) * num_local)
        experts = self.local(layer, rank, num_local)
        first = first_slots(self.slots[layer]) if self.slots else set(block)
        return [
            (place, expert)
            for place, (slot, expert) in enumerate(zip(block, experts, strict=True))
            if slot in first
        ]


def placement_problems(
    config: Config, model: ModelShape, num_ranks: int, num_nodes: int
) -> list[str]:
    """What does not divide over ranks or nodes, and more replicas than ranks to be on."""
    kind, redundant = config.experts.placement, config.experts.redundant
    if kind == "contiguous":
        return []
    if kind == "balanced_by_node":
        wrong = node_problem(model.router.n_group, redundant, num_ranks, num_nodes)
        if wrong:
            return [f"experts.placement: got {kind}; {wrong}; accepted here: balanced"]
        model = replace(model, num_experts=model.num_experts // num_nodes)
        num_ranks, redundant = num_ranks // num_nodes, redundant // num_nodes
    wrong = redundant_problem(model.num_experts, redundant, num_ranks) if redundant else None
    within = " (of one node)" if kind == "balanced_by_node" else ""
    return [f"experts.redundant{within}: {wrong}"] if wrong else []


def plan_placement(
    config: Config,
    model: ModelShape,
    layers: tuple[LoopLayer, ...],
    num_ranks: int,
    num_nodes: int,
    recorded: Recorded,
) -> PlacementPlan:
    """The placement of every layer of the loop."""
    loads = [
        [float(one) for one in load]
        for load in expected_load(config, model, layers, num_ranks, recorded)
    ]
    plain = contiguous(model.num_experts)
    slots: tuple[Slots, ...] = ()
    if config.experts.placement != "contiguous":
        slots = tuple(
            balanced(
                load,
                config.experts.redundant,
                num_ranks,
                num_nodes=num_nodes if config.experts.placement == "balanced_by_node" else 1,
                num_groups=model.router.n_group,
            )
            for load in loads
        )
    before = [_imbalance(plain, load, num_ranks) for load in loads]
    after = [_imbalance(one, load, num_ranks) for one, load in zip(slots, loads, strict=False)]
    return PlacementPlan(
        kind=config.experts.placement,
        redundant=config.experts.redundant,
        slots=slots,
        load=_source(config, recorded),
        rank_imbalance=sum(after or before) / len(loads),
        rank_imbalance_contiguous=sum(before) / len(loads),
    )


def _imbalance(slots: Slots, load: list[float], num_ranks: int) -> float:
    """Experts that do not divide over the ranks leave the last rank short."""
    padded = -(-len(slots) // num_ranks) * num_ranks
    if padded == len(slots):
        return imbalance(rank_loads(slots, load, num_ranks))
    spare = range(len(load), len(load) + padded - len(slots))
    return imbalance(rank_loads([*slots, *spare], [*load, *(0.0 for _ in spare)], num_ranks))


def _source(config: Config, recorded: Recorded) -> str:
    found = recorded.load or recorded.routing
    if found is not None:
        return found.source
    kind = config.routing.kind
    return "even: the gate's choice is not known" if kind == "model" else f"routing.kind {kind}"
