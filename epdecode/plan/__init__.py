"""(Config, model, world size) -> Plan: everything that follows from what the user wrote. Pure.

Placement, buckets, buffer bytes, queue pairs, memory, floors; every limit is checked here, before
any process group or allocation, and every broken rule is reported at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from epdecode.config import Config
from epdecode.config.rules import config_rules, model_rules
from epdecode.errors import ConfigError
from epdecode.models import ModelShape
from epdecode.models.layers import LoopLayer, layer_problems, loop_layers
from epdecode.plan import limits, memory
from epdecode.plan.expert_loads import ASSUMED, Kernels
from epdecode.plan.expert_site import Site
from epdecode.plan.experts import ExpertsPlan, choose_experts, experts_problems
from epdecode.plan.floors import (
    Floor,
    Traffic,
    copies_per_token,
    expected_hit,
    stage_floors,
    weight_floor_us,
)
from epdecode.plan.hardware import Device, resolve_device
from epdecode.plan.model import effective_model, model_choices, model_problems
from epdecode.plan.placed import PlacementPlan, placement_problems, plan_placement
from epdecode.plan.transport import (
    TransportPlan,
    layout_of,
    plan_transport,
    transport_problems,
)
from epdecode.plan.workspaces import workspace_bytes
from epdecode.routing.load import NOTHING, Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that follows from a config, a model and a world size."""

    model: ModelShape
    """The effective shape: with parallel.stand_in_ep, num_experts is this world's share; with FP8
    weights, expert_size is padded to whole blocks."""
    plain_expert_size: int
    """The model's own expert size."""
    layers: int
    loop_layers: tuple[LoopLayer, ...]
    """Which of the model's MoE layers they are."""
    world_size: int
    ranks_per_gpu: int
    num_experts: int
    """Physical experts: the model's and their replicas; model.num_experts counts the model's."""
    num_local_experts: int
    max_tokens: int
    """Rows one rank may dispatch in a step."""
    capacity: int
    """Rows one expert can receive: world_size * max_tokens."""
    buckets: tuple[int, ...]
    tokens_per_rank: int
    transport: TransportPlan
    experts: ExpertsPlan
    placement: PlacementPlan
    graph_enabled: bool
    device: Device | None
    memory: dict[str, int]
    """Bytes a rank takes, by category."""
    floors: dict[str, Floor]
    """Per stage, one layer, one rank, at tokens_per_rank and uniform routing."""
    weight_floor_us: float | None
    copies_per_token: float
    """Times a token is sent: once per expert, or (packed) once per rank, at uniform routing."""
    chosen: dict[str, str]
    """Whatever ``auto`` became, and why."""

    @property
    def memory_bytes(self) -> int:
        """Bytes one rank takes."""
        return sum(self.memory.values())

    @property
    def shared_gpu(self) -> bool:
        """Ranks share a GPU: times then mean nothing."""
        return self.ranks_per_gpu > 1

    def local_experts(self, rank: int, layer: int = 0) -> Sequence[int]:
        """Logical ids of a rank's experts in a layer of the loop, in the order of its slots."""
        return self.placement.local(layer, rank, self.num_local_experts)

    def first_experts(self, rank: int, layer: int) -> list[tuple[int, int]]:
        """(local slot, logical id) of a rank's experts without replicas held elsewhere before it:
        over all ranks every expert once."""
        return self.placement.first_local(layer, rank, self.num_local_experts)


def make_plan(  # noqa: PLR0913 - each one is a fact of the machine or of a file
    config: Config,
    model: ModelShape,
    world_size: int,
    *,
    found: Device | None = None,
    ranks_per_gpu: int = 1,
    ranks_per_node: int | None = None,
    qp_depth_set: int | None = None,
    recorded: Recorded = NOTHING,
    kernels: Kernels = ASSUMED,
) -> Plan:
    """The plan, or one ConfigError that lists every rule the config breaks.

    found: the GPU at hand; ranks_per_gpu: ranks that share one; ranks_per_node: None = one node;
    qp_depth_set: NVSHMEM_QP_DEPTH where the environment sets it; recorded: the files the config
    names (read_recorded), without which recorded load counts as even; kernels: what the machine has
    to run experts with.
    """
    device = resolve_device(config.hardware, found)
    if config.transport.name == "torch_a2a" and found is None:
        device = None
    nodes = -(-world_size // (ranks_per_node or world_size))
    problems = _structure_problems(config, model, world_size, nodes)
    if problems:
        raise ConfigError(_report(problems))
    shape = effective_model(config, model, world_size)
    request = limits.Request(
        transport=config.transport.name,
        wire=config.transport.wire,
        hidden=shape.hidden,
        expert_size=shape.expert_size,
        top_k=shape.top_k,
        num_experts=shape.num_experts + config.experts.redundant,
        ep=world_size,
        max_tokens=config.transport.max_tokens_per_rank,
        num_sms=device.num_sms if device else 132,
        comm_sms=config.transport.num_sms,
        qp_depth_set=qp_depth_set,
    )
    site = Site(config, shape, request, device, kernels)
    experts, chosen = choose_experts(site)
    problems = limits.violations(request) + [str(breach) for breach in model_rules(shape)]
    problems += experts_problems(experts, layout_of(config), request, shape.weight_format, device)
    if problems:
        raise ConfigError(_report(problems))
    loop = loop_layers(config.layers, model)
    placement = plan_placement(config, shape, loop, world_size, nodes, recorded)
    plan = _assemble(site, experts, ranks_per_gpu, placement)
    plan = replace(
        plan,
        plain_expert_size=model.expert_size,
        chosen=model_choices(model, shape) | chosen | plan.chosen,
    )
    if too_big := memory.does_not_fit(plan.memory, device, ranks_per_gpu):
        raise ConfigError(_report([too_big]))
    return plan


def _assemble(
    site: Site, experts: ExpertsPlan, ranks_per_gpu: int, placement: PlacementPlan
) -> Plan:
    config, model, request, device = site.config, site.model, site.request, site.device
    transport, chosen = plan_transport(config, request, experts.name)
    experts = _with_workspaces(experts, model, transport)
    num_local = request.num_experts // request.ep
    tokens = config.batch.tokens_per_rank
    rows = tokens * model.top_k
    hit = expected_hit(request.num_experts, num_local, request.ep * rows)
    copies = copies_per_token(transport.layout, model.top_k, request.num_experts, request.ep)
    return Plan(
        model=model,
        plain_expert_size=model.expert_size,
        layers=config.num_layers,
        loop_layers=loop_layers(config.layers, model),
        world_size=request.ep,
        ranks_per_gpu=ranks_per_gpu,
        num_experts=request.num_experts,
        num_local_experts=num_local,
        max_tokens=request.max_tokens,
        capacity=request.ep * request.max_tokens,
        buckets=config.batch.buckets,
        tokens_per_rank=tokens,
        transport=transport,
        experts=experts,
        placement=placement,
        graph_enabled=config.graph.enabled,
        device=device,
        memory=memory.of_rank(config, model, request, transport, experts),
        floors=stage_floors(
            model,
            Traffic(tokens=tokens, copies=copies, rows=rows, experts_hit=hit),
            wire_fp8=request.wire == "fp8",
            shared_wire=request.ep == ranks_per_gpu,
            device=device,
        ),
        weight_floor_us=weight_floor_us(model, hit, device),
        copies_per_token=copies,
        chosen=chosen,
    )


def _structure_problems(
    config: Config, model: ModelShape, world_size: int, num_nodes: int
) -> list[str]:
    problems, ep = [], config.parallel.ep
    if ep not in ("auto", world_size):
        accepted = f"accepted: auto or {world_size}"
        problems.append(f"parallel.ep: got {ep} with {world_size} ranks; {accepted}")
    problems += model_problems(config, model, world_size)
    problems += layer_problems(config.layers, model)
    shape = effective_model(config, model, world_size)
    problems += placement_problems(config, shape, world_size, num_nodes)
    problems += [str(breach) for breach in config_rules(config)]
    problems += transport_problems(config, world_size)
    return problems


def _with_workspaces(
    experts: ExpertsPlan, model: ModelShape, transport: TransportPlan
) -> ExpertsPlan:
    if transport.layout == "masked":
        return experts
    made = workspace_bytes(
        experts.name,
        model,
        rows=transport.packed_rows,
        wire=transport.wire,
        fused_activation=experts.fused_activation,
        fused_quant_layout=experts.fused_quant_layout,
    )
    return replace(experts, workspace_bytes=made)


def _report(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems:\n" + "\n".join(f"  {problem}" for problem in problems)


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, for results and ``epdecode plan --json``."""
    return asdict(plan)


def render(plan: Plan) -> str:
    """The plan as text, for ``epdecode plan`` and the log."""
    from epdecode.plan.text import render_plan

    return render_plan(plan)
