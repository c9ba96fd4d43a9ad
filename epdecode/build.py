"""Plan + world -> a runtime: every member is chosen here, once, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from epdecode.batch import Fp8Rows, Route, Rows, no_mark
from epdecode.clock import Clock, build_clock
from epdecode.config import Config
from epdecode.experts import Experts, build_experts
from epdecode.graphs import EagerStep, GraphStep, Step, StepInputs
from epdecode.kernels.fp8 import mn_major_scales, num_groups, quantize_ref
from epdecode.kernels.group_quant import group_quant
from epdecode.kernels.rms_norm import rms_norm, rms_norm_ref
from epdecode.kernels.router import router, router_ref
from epdecode.layer import NORM_EPS, MoELayer
from epdecode.plan import Plan
from epdecode.router import ForcedRouter, GateRouter, Router, rule_of
from epdecode.shared import (
    Fill,
    GroupedSharedExpert,
    Lane,
    NoSharedExpert,
    SerialLane,
    SharedExpert,
    StreamLane,
)
from epdecode.transport import Transport, build_transport
from epdecode.weights import LayerWeights, seeded_layer
from epdecode.world import World


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything one rank holds while it runs."""

    plan: Plan
    world: World
    transport: Transport
    experts: Experts
    layers: tuple[MoELayer, ...]
    weights: tuple[LayerWeights, ...]
    inputs: StepInputs
    clock: Clock
    memory: dict[str, int]
    """Bytes of device memory each part took when it was built."""

    def moe(self, layer: int, x: torch.Tensor, given: Route) -> torch.Tensor:
        """One layer's experts on the caller's rows: x bfloat16 [T, H] -> bfloat16 [T, H].

        Collective: every rank calls it, with zero rows where it has none. ``given``: make_route.
        """
        num_tokens = torch.tensor([x.shape[0]], dtype=torch.int32, device=x.device)
        out, _ = self.layers[layer].apply(x, given, num_tokens, no_mark)
        return out

    def eager(self) -> EagerStep:
        """The step launched from the host."""
        return EagerStep(self.layers, self.inputs, self.clock)

    def step(self) -> Step:
        """The step the plan asks for; captures the graphs."""
        if self.plan.graph_enabled:
            return GraphStep(self.layers, self.inputs, self.clock, self.plan.buckets)
        return self.eager()

    def close(self) -> None:
        """Release the buffers; collective, before the group is left."""
        self.transport.close()


def build(config: Config, plan: Plan, world: World) -> Runtime:
    """Buffer first (the largest), then weights, then workspaces."""
    ledger = _Ledger(world.device)
    transport = build_transport(plan, world)
    weights = tuple(
        seeded_layer(
            plan.model, layer, plan.local_experts(world.rank), config.run.seed, world.device
        )
        for layer in range(plan.layers)
    )
    ledger.note("weights")
    inputs = _inputs(config, plan, world.device)
    experts = build_experts(plan, world.device)
    shared = _shared_builder(config, plan, world.device)
    layers = tuple(
        _layer(config, plan, inputs, index, one, transport, experts, shared)
        for index, one in enumerate(weights)
    )
    ledger.note("workspaces")
    return Runtime(
        plan=plan,
        world=world,
        transport=transport,
        experts=experts,
        layers=layers,
        weights=weights,
        inputs=inputs,
        clock=build_clock(world.device),
        memory=ledger.taken,
    )


class _Ledger:
    """What the allocator handed out between two notes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._now()
        self.taken: dict[str, int] = {}

    def note(self, category: str) -> None:
        now = self._now()
        self.taken[category] = now - self._before
        self._before = now

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


def _layer(
    config: Config,
    plan: Plan,
    inputs: StepInputs,
    index: int,
    weights: LayerWeights,
    transport: Transport,
    experts: Experts,
    shared: Callable[[LayerWeights], SharedExpert],
) -> MoELayer:
    norm_op = rms_norm if inputs.hidden.is_cuda else rms_norm_ref
    return MoELayer(
        norm=lambda hidden: norm_op(hidden, weights.norm, NORM_EPS, torch.empty_like(hidden)),
        router=_router(config, plan, inputs, index, weights),
        transport=transport,
        experts=experts,
        weights=experts.prepare(weights.experts),
        shared=shared(weights),
    )


def _router(
    config: Config, plan: Plan, inputs: StepInputs, index: int, weights: LayerWeights
) -> Router:
    if config.routing.kind != "model":
        return ForcedRouter(*inputs.forced[index])
    topk = router if inputs.hidden.is_cuda else router_ref
    return GateRouter(weights.gate, weights.bias, rule_of(plan.model), topk)


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


def _shared_builder(
    config: Config, plan: Plan, device: torch.device
) -> Callable[[LayerWeights], SharedExpert]:
    """One experts member of one group, its input buffer and its lane, used by all layers."""
    if not plan.model.shared_size:
        return lambda weights: NoSharedExpert()
    wide = replace(plan.model, expert_size=plan.model.shared_size)
    experts = build_experts(
        replace(plan, model=wide, num_local_experts=1, capacity=plan.max_tokens), device
    )
    rows = _shared_rows(plan, device)
    fill = _fill(plan, device)
    aside = config.overlap.shared_expert and device.type == "cuda"
    lane: Lane = StreamLane() if aside else SerialLane()

    def build_one(weights: LayerWeights) -> SharedExpert:
        if weights.shared is None:
            raise RuntimeError("the model has a shared expert but its weights are missing")
        return GroupedSharedExpert(experts, weights.shared, rows, fill, lane)

    return build_one


def _shared_rows(plan: Plan, device: torch.device) -> Rows:
    shape = (1, plan.max_tokens, plan.model.hidden)
    if plan.transport.wire == "bf16":
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)
    groups = num_groups(plan.model.hidden, "hidden")
    return Fp8Rows(
        torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device),
        mn_major_scales(1, plan.max_tokens, groups, plan.experts.scale_format, device),
    )


def _fill(plan: Plan, device: torch.device) -> Fill:
    """How this rank's normed rows become the shared expert's input."""
    if plan.transport.wire == "bf16":
        return _copy_rows
    scale_format = plan.experts.scale_format

    def quantise(normed: torch.Tensor, rows: Rows) -> None:
        assert isinstance(rows, Fp8Rows)
        made = quantize_ref(normed, scale_format)
        rows.data[0, : normed.shape[0]] = made.data
        rows.scales[0, : normed.shape[0]] = made.scales

    def quantise_fused(normed: torch.Tensor, rows: Rows) -> None:
        assert isinstance(rows, Fp8Rows)
        tokens = normed.shape[0]
        out = Fp8Rows(rows.data[0, :tokens], rows.scales[0, :tokens])
        group_quant(normed, scale_format, "column", out)

    return quantise_fused if device.type == "cuda" else quantise


def _copy_rows(normed: torch.Tensor, rows: Rows) -> None:
    assert isinstance(rows, torch.Tensor)
    rows[0, : normed.shape[0]] = normed
