"""The plan as text: what will be built, what it takes, and the least it can cost."""

from __future__ import annotations

from collections.abc import Iterator

from epdecode.plan import Plan
from epdecode.plan.transport import TransportPlan

GIB = 1 << 30


def render_plan(plan: Plan) -> str:
    """Aligned lines, no colour: for ``epdecode plan`` and the log."""
    return "\n".join([*_facts(plan), "", *_memory(plan), "", *_floors(plan)])


def _facts(plan: Plan) -> Iterator[str]:
    model, transport = plan.model, plan.transport
    device = plan.device.name if plan.device else "none (CPU)"
    yield f"model       {model.name}: hidden {model.hidden}, expert size {model.expert_size}, "
    yield f"            {model.num_experts} experts, top-{model.top_k}, {model.weight_format}"
    yield f"ranks       {plan.world_size}, {plan.ranks_per_gpu} per device; device {device}"
    yield from _placement(plan)
    yield f"tokens      {plan.tokens_per_rank} a rank, at most {plan.max_tokens}"
    yield f"capacity    {plan.capacity} rows: all tokens of all ranks on one expert"
    graphs = "on" if plan.graph_enabled else "off"
    yield f"buckets     {', '.join(map(str, plan.buckets))}; CUDA graphs {graphs}"
    yield f"transport   {transport.name}, {transport.layout} rows, {transport.wire} wire"
    yield from _buffers(transport)
    yield from _packed_rows(plan)
    yield f"experts     {plan.experts.name}, {plan.experts.scale_format} scales"
    for key, why in plan.chosen.items():
        yield f"chosen      {key} = {why}"


def _placement(plan: Plan) -> Iterator[str]:
    local, placement = plan.num_local_experts, plan.placement
    if placement.slots:
        kind, redundant = placement.kind, placement.redundant
        yield f"placement   {kind}: {local} slots a rank, {redundant} replicas in all"
    else:
        yield f"placement   {local} experts a rank, rank r holds r*{local} and on"
    before, after = placement.rank_imbalance_contiguous, placement.rank_imbalance
    if before != 1 or placement.slots:
        balanced = f", balanced {after:.3f}" if placement.slots else ""
        yield f"imbalance   of ranks: contiguous {before:.3f}{balanced} ({placement.load})"


def _buffers(transport: TransportPlan) -> Iterator[str]:
    facts = [
        f"{name} {size} bytes ({size / GIB:.2f} GiB)"
        for name, size in (("NVLink", transport.nvl_bytes), ("RDMA", transport.rdma_bytes))
        if size
    ]
    if transport.qp_depth:
        facts.append(f"{transport.num_qps} QPs of depth {transport.qp_depth}")
    if transport.num_sms:
        facts.append(f"{transport.num_sms} SMs")
    if facts:
        yield f"buffer      {', '.join(facts)}"


def _packed_rows(plan: Plan) -> Iterator[str]:
    transport = plan.transport
    if transport.layout == "masked":
        return
    waits = "always taken, no host wait" if transport.worst_case_rows else "the host waits for each"
    yield f"received    at most {transport.received_rows} rows, {waits}"
    yield f"packed      at most {transport.packed_rows}, blocks of {transport.row_alignment} rows"
    first, second = plan.experts.workspace_bytes
    yield f"workspaces  {first} and {second} bytes, shared by all stages and layers"


def _memory(plan: Plan) -> Iterator[str]:
    yield "memory of a rank, worst case (every token to one rank)"
    for name, size in sorted(plan.memory.items(), key=lambda item: -item[1]):
        yield f"  {name:<18}{size / GIB:>9.2f} GiB"
    total = f"  {'total':<18}{plan.memory_bytes / GIB:>9.2f} GiB"
    if plan.device:
        share = plan.device.memory_bytes / plan.ranks_per_gpu / GIB
        total += f" of {share:.2f} GiB ({plan.device.name} / {plan.ranks_per_gpu})"
    yield total


def _floors(plan: Plan) -> Iterator[str]:
    yield f"floors of one layer at {plan.tokens_per_rank} tokens a rank, uniform routing"
    yield f"  {'stage':<16}{'MB':>10}{'GFLOP':>10}{'us':>10}"
    for stage, floor in plan.floors.items():
        us = "-" if floor.floor_us is None else f"{floor.floor_us:.1f}"
        note = "  the three above in one launch" if stage == "expert_chain" else ""
        yield f"  {stage:<16}{floor.bytes / 1e6:>10.2f}{floor.flops / 1e9:>10.2f}{us:>10}{note}"
    if plan.weight_floor_us is not None and plan.device:
        yield (
            f"  weights of the experts hit, streamed once: {plan.weight_floor_us:.1f} us at "
            f"{plan.device.hbm_bytes_s / 1e12:.2f} TB/s ({plan.device.source})"
        )
