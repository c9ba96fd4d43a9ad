"""Plan + world -> a runtime: every member is chosen here, once, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from epdecode.align import Align, build_align
from epdecode.batch import Mark, Route, no_mark
from epdecode.clock import Clock, build_clock
from epdecode.config import Config
from epdecode.experts import Experts, build_experts
from epdecode.graphs import EagerStep, GraphStep, Step, StepInputs
from epdecode.kernels.rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from epdecode.layer import MoELayer
from epdecode.ledger import Ledger
from epdecode.nonfinite import Tally
from epdecode.plan import Plan
from epdecode.router import KERNELS, PLAIN, ForcedRouter, GateRouter, Router, rule_of
from epdecode.routing.load import Recorded
from epdecode.shared import SharedExpert, shared_maker
from epdecode.sources import NO_SOURCES, Sources
from epdecode.transport import Transport, build_transport
from epdecode.transport.placed import place
from epdecode.weights.seeded import LayerWeights
from epdecode.weights.source import Loading, load_weights
from epdecode.world import World


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything one rank holds while it runs."""

    plan: Plan
    world: World
    transport: Transport
    align: Align
    experts: Experts
    layers: tuple[MoELayer, ...]
    weights: tuple[LayerWeights, ...]
    inputs: StepInputs
    clock: Clock
    memory: dict[str, int]
    """Bytes of device memory each part took when it was built."""
    loading: Loading
    """What bringing the weights in took."""
    recorded: Recorded
    """Routes from files, for make_batches."""
    tally: Tally | None
    """Counts non-finite rows where the config asks for it."""

    def moe(self, layer: int, x: torch.Tensor, given: Route) -> torch.Tensor:
        """One layer's experts on the caller's rows: x bfloat16 [T, H] -> bfloat16 [T, H].

        Collective: every rank calls it, with zero rows where it has none. ``given``: make_route.
        """
        num_tokens = torch.tensor([x.shape[0]], dtype=torch.int32, device=x.device)
        return self.layers[layer].apply(x, given, num_tokens, no_mark)

    def eager(self) -> EagerStep:
        """The step launched from the host."""
        return EagerStep(self.layers, self.inputs, self.clock)

    def step(self, mark: Mark = no_mark) -> Step:
        """The step the plan asks for; captures the graphs. ``mark`` hears of launched stages."""
        if self.plan.graph_enabled:
            return GraphStep(self.layers, self.inputs, self.clock, self.plan.buckets, self._line_up)
        return EagerStep(self.layers, self.inputs, self.clock, mark, self._line_up)

    def _line_up(self) -> None:
        if self.world.device.type == "cuda":
            self.align.barrier(torch.cuda.current_stream())

    def close(self) -> None:
        """Release the buffers; collective, before the group is left."""
        self.align.close()
        self.transport.close()


def build(config: Config, plan: Plan, world: World, sources: Sources = NO_SOURCES) -> Runtime:
    """Buffer first (the largest), then weights, then workspaces.

    sources: the files that the config names, opened and checked (session.prepare).
    """
    ledger = Ledger(world.device, alone=plan.ranks_per_gpu == 1)
    transport = build_transport(plan, world)
    ledger.note("packing")
    ledger.note_outside("transport_buffer")
    weights, loading = load_weights(config, plan, world, sources.checkpoint)
    ledger.note("weights")
    inputs = _inputs(config, plan, world.device)
    experts = build_experts(plan, world.device)
    tally = Tally(plan.num_local_experts, world.device) if config.debug.non_finite else None
    if tally:
        transport, experts = tally.around(transport, experts)
    shared = shared_maker(config, plan, world.device)
    make = _LayerMaker(
        config,
        plan,
        inputs,
        partial(place, transport, plan, world),
        experts,
        shared,
        tally.around_router if tally else _as_it_is,
    )
    following = (*(one.norm for one in weights[1:]), None)
    layers = tuple(
        make(index, one, norm)
        for index, (one, norm) in enumerate(zip(weights, following, strict=True))
    )
    ledger.note("workspaces")
    return Runtime(
        plan=plan,
        world=world,
        transport=transport,
        align=build_align(config.run.align, world, plan.transport.name),
        experts=experts,
        layers=layers,
        weights=weights,
        inputs=inputs,
        clock=build_clock(world.device),
        memory=ledger.taken,
        loading=loading,
        recorded=sources.recorded,
        tally=tally,
    )


@dataclass(frozen=True, slots=True)
class _LayerMaker:
    """What all layers of a rank share."""

    config: Config
    plan: Plan
    inputs: StepInputs
    transport: Callable[[int], Transport]
    """Of one layer: which experts are where may differ between layers."""
    experts: Experts
    shared: Callable[[LayerWeights], SharedExpert]
    watch_router: Callable[[Router], Router]

    def __call__(
        self, index: int, weights: LayerWeights, next_norm: torch.Tensor | None
    ) -> MoELayer:
        on_gpu, eps = self.inputs.hidden.is_cuda, self.plan.model.rms_norm_eps
        norm_op = rms_norm if on_gpu else rms_norm_ref
        end_op = add_rms_norm if on_gpu else add_rms_norm_ref
        return MoELayer(
            norm=lambda hidden: norm_op(hidden, weights.norm, eps, torch.empty_like(hidden)),
            router=self.watch_router(_router(self.config, self.plan, self.inputs, index, weights)),
            transport=self.transport(index),
            experts=self.experts,
            weights=self.experts.prepare(weights.experts),
            shared=self.shared(weights),
            end=partial(end_op, weight=next_norm, eps=eps),
        )


def _as_it_is(router: Router) -> Router:
    return router


def _router(
    config: Config, plan: Plan, inputs: StepInputs, index: int, weights: LayerWeights
) -> Router:
    if config.routing.kind != "model":
        return ForcedRouter(*inputs.forced[index])
    ops = KERNELS if inputs.hidden.is_cuda else PLAIN
    return GateRouter(weights.gate, weights.bias, rule_of(plan.model), ops)


def _inputs(config: Config, plan: Plan, device: torch.device) -> StepInputs:
    rows, top_k = max(plan.buckets), plan.model.top_k
    forced = tuple(
        (
            torch.full((rows, top_k), -1, dtype=torch.int64, device=device),
            torch.zeros(rows, top_k, dtype=torch.float32, device=device),
        )
        for _ in range(plan.layers if config.routing.kind != "model" else 0)
    )
    return StepInputs(
        hidden=torch.zeros(rows, plan.model.hidden, dtype=torch.bfloat16, device=device),
        num_tokens=torch.zeros(1, dtype=torch.int32, device=device),
        forced=forced,
    )
