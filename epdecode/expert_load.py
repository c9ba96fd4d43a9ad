"""How evenly rows fell on experts and ranks, from the counts that every layer of a step noted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epdecode.plan import Plan
from epdecode.result import ExpertLoad
from epdecode.world import World


@dataclass(frozen=True, slots=True)
class Received:
    """Received rows, means over layers and steps."""

    summary: ExpertLoad
    busiest_rows: float
    """Rows of the busiest rank."""
    experts_hit: float
    """Slots with a row on the rank that has most of them."""


def gather_load(plan: Plan, world: World, counts: Sequence[torch.Tensor]) -> Received:
    """Of all ranks. Collective. counts: int32 [E], one a layer, layers of a step in order."""
    ranks = torch.stack(world.gather(torch.stack(list(counts)).double()))
    by_expert = by_logical(ranks.transpose(0, 1).flatten(1), plan)
    by_rank = ranks.sum(2).T
    return Received(
        summary=ExpertLoad(
            max=float(by_expert.amax(1).mean()),
            mean=float(by_expert.mean()),
            imbalance=_ratio(by_expert),
            rank_imbalance=_ratio(by_rank),
        ),
        busiest_rows=float(by_rank.amax(1).mean()),
        experts_hit=float((ranks > 0).sum(2).amax(0).double().mean()),
    )


def by_logical(by_slot: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Rows per logical expert [n, num_experts] from rows per slot [n, slots]; line i is of the
    loop's layer i modulo their number."""
    if not plan.placement.slots:
        return by_slot
    owners = torch.tensor(plan.placement.slots).repeat(by_slot.shape[0] // plan.layers, 1)
    logical = by_slot.new_zeros(by_slot.shape[0], plan.model.num_experts)
    return logical.scatter_add_(1, owners, by_slot)


def _ratio(loads: torch.Tensor) -> float:
    """Mean over steps of max / mean; 1 where a step had no rows at all."""
    means = loads.mean(1)
    ratios = torch.where(means > 0, loads.amax(1) / means, torch.ones_like(means))
    return float(ratios.mean())
