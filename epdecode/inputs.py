"""Synthetic batches: the same on every machine, each rank knowing every other's token counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epdecode.config import Config
from epdecode.graphs import StepBatch, choose_bucket
from epdecode.plan import Plan
from epdecode.routing import RULES, RoutingJob, forced_weights
from epdecode.weights import generator
from epdecode.world import World

DISTINCT = 8
"""Batches made before the loop; steps cycle through them."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One step's batch: the bucket that fits the largest rank, and this rank's tokens."""

    bucket: int
    batch: StepBatch
    counts: tuple[int, ...]
    """Tokens of every rank."""


def make_batches(config: Config, plan: Plan, world: World) -> list[Planned]:
    """The batches of a run, on this rank's device."""
    distinct = min(DISTINCT, config.run.steps)
    return [make_batch(config, plan, world, step) for step in range(distinct)]


def make_batch(config: Config, plan: Plan, world: World, step: int) -> Planned:
    """One batch; hidden states are unit normal."""
    counts = token_counts(config, world.size, step)
    gen = generator(world.device, "hidden", config.run.seed, world.rank, step)
    hidden = torch.randn(
        counts[world.rank], plan.model.hidden, device=world.device, generator=gen
    ).to(torch.bfloat16)
    forced = tuple(
        _forced(config, plan, world, layer, step, counts[world.rank])
        for layer in range(plan.layers if config.routing.kind != "model" else 0)
    )
    return Planned(choose_bucket(plan.buckets, max(counts)), StepBatch(hidden, forced), counts)


def token_counts(config: Config, world_size: int, step: int) -> tuple[int, ...]:
    """Tokens of every rank in a step: no rank has to ask another."""
    most = config.batch.tokens_per_rank
    if not config.batch.vary:
        return (most,) * world_size
    gen = generator(torch.device("cpu"), "counts", config.run.seed, step)
    return tuple(torch.randint(0, most + 1, (world_size,), generator=gen).tolist())


def _forced(
    config: Config, plan: Plan, world: World, layer: int, step: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    job = RoutingJob(
        tokens=tokens,
        top_k=plan.model.top_k,
        num_experts=plan.num_experts,
        world_size=world.size,
        rank=world.rank,
        layer=layer,
        step=step,
        seed=config.routing.seed,
    )
    ids = RULES[config.routing.kind](job)
    weights = forced_weights(ids, plan.model.router.routed_scaling_factor)
    return ids.to(world.device), weights.to(world.device)
