"""Synthetic batches: the same on every machine, each rank knowing every other's token counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from epdecode.config import Config
from epdecode.graphs import StepBatch, choose_bucket
from epdecode.models.layers import LoopLayer, recorded_rows
from epdecode.plan import Plan
from epdecode.routing.load import NOTHING, Recorded, likelihood, weights_for
from epdecode.routing.rules import RULES, RoutingJob, forced_weights
from epdecode.routing.table import LoadTable
from epdecode.routing.trace import Trace
from epdecode.weights.seeded import generator
from epdecode.world import World

DISTINCT = 8
"""Batches made before the loop; steps cycle through them. A trace has its own for every step."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One step's batch: the bucket that fits the largest rank, and this rank's tokens."""

    bucket: int
    batch: StepBatch
    counts: tuple[int, ...]
    """Tokens of every rank."""


def make_batches(
    config: Config, plan: Plan, world: World, recorded: Recorded = NOTHING
) -> list[Planned]:
    """The batches of a run, on this rank's device."""
    counts = [token_counts(config, world.size, step) for step in range(num_batches(config))]
    routes = _Routes(config, plan, world, recorded)
    firsts = first_tokens(counts)
    hidden: dict[tuple[int, int], torch.Tensor] = {}
    batches = []
    for step, now in enumerate(counts):
        tokens = now[world.rank]
        # The steps of a long trace share the hidden states of a few.
        key = (step % DISTINCT, tokens)
        if key not in hidden:
            hidden[key] = _hidden(config, plan, world, *key)
        forced = routes(step, firsts[step][world.rank], tokens)
        bucket = choose_bucket(plan.buckets, max(now))
        batches.append(Planned(bucket, StepBatch(hidden[key], forced), now))
    return batches


def num_batches(config: Config) -> int:
    """Distinct batches of a run."""
    if config.routing.kind == "trace":
        return config.run.steps
    return min(DISTINCT, config.run.steps)


def token_counts(config: Config, world_size: int, step: int) -> tuple[int, ...]:
    """Tokens of every rank in a step: no rank has to ask another."""
    most = config.batch.tokens_per_rank
    if not config.batch.vary:
        return (most,) * world_size
    gen = generator(torch.device("cpu"), "counts", config.run.seed, step)
    return tuple(torch.randint(0, most + 1, (world_size,), generator=gen).tolist())


def tokens_needed(config: Config, world_size: int) -> int:
    """Tokens of all ranks in all distinct batches: how long a trace must be."""
    return sum(sum(token_counts(config, world_size, step)) for step in range(num_batches(config)))


def first_tokens(counts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per step and rank, how many tokens go before it: steps in order, within a step the ranks."""
    firsts, before = [], 0
    for step in counts:
        firsts.append([before + sum(step[:rank]) for rank in range(len(step))])
        before += sum(step)
    return firsts


def _hidden(config: Config, plan: Plan, world: World, step: int, tokens: int) -> torch.Tensor:
    """bfloat16 [tokens, H], unit normal."""
    gen = generator(world.device, "hidden", config.run.seed, world.rank, step)
    shape = (tokens, plan.model.hidden)
    return torch.randn(shape, device=world.device, generator=gen).to(torch.bfloat16)


class _Routes:
    """Makes a step's forced routes, one (ids, weights) a layer; none where the gate chooses."""

    def __init__(self, config: Config, plan: Plan, world: World, recorded: Recorded) -> None:
        self._routing = config.routing
        self._plan = plan
        self._world = world
        self._trace = recorded.routing if isinstance(recorded.routing, Trace) else None
        self._rows = recorded_rows_of(recorded.routing, plan)
        self._weights = [
            self._likely(recorded.routing, position, layer)
            for position, layer in enumerate(plan.loop_layers)
        ]

    def __call__(
        self, step: int, first: int, tokens: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """The routes of this rank's ``tokens``, before which ``first`` tokens were routed."""
        if self._routing.kind == "model":
            return ()
        return tuple(self._layers(step, first, tokens))

    def _layers(
        self, step: int, first: int, tokens: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        found = self._trace.tokens(first, tokens) if self._trace else None
        rule = RULES[self._routing.kind]
        for position in range(self._plan.layers):
            part = None if found is None else found[:, self._rows[position]].astype("int64")
            job = RoutingJob(
                tokens=tokens,
                top_k=self._plan.model.top_k,
                num_experts=self._plan.model.num_experts,
                world_size=self._world.size,
                rank=self._world.rank,
                layer=position,
                step=step,
                seed=self._routing.seed,
                share=self._routing.share,
                weights=self._weights[position],
                recorded=None if part is None else torch.from_numpy(part),
            )
            ids = rule(job)
            weights = forced_weights(ids, self._plan.model.router.routed_scaling_factor)
            yield ids.to(self._world.device), weights.to(self._world.device)

    def _likely(
        self, recorded: Trace | LoadTable | None, position: int, layer: LoopLayer
    ) -> torch.Tensor | None:
        model, routing = self._plan.model, self._routing
        if routing.kind in ("zipf", "lognormal"):
            return torch.from_numpy(likelihood(routing, model.num_experts, layer))
        if isinstance(recorded, LoadTable):
            counts = recorded.row(self._rows[position], model.num_experts)
            return torch.from_numpy(weights_for(counts, model.top_k, recorded.source))
        return None


def recorded_rows_of(recorded: Trace | LoadTable | None, plan: Plan) -> tuple[int, ...]:
    """The recording's row of each layer of the loop; none without a recording."""
    if recorded is None:
        return ()
    return recorded_rows(recorded.num_rows, plan.loop_layers, plan.model, recorded.source)
