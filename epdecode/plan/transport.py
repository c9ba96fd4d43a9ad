"""The transport's part of the plan: layout, buffers, queue pairs and the rows that can arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from epdecode.config import Config
from epdecode.plan import limits, limits_ht
from epdecode.plan.limit_rule import Request

Layout = Literal["masked", "packed"]

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "torch_a2a": ("masked", "packed"),
    "deepep_ll": ("masked",),
    "deepep_ht": ("packed",),
}
"""How each transport can deliver rows; the first is its ``auto``."""

ROW_ALIGNMENT = {"torch_loop": 16, "triton_gemm": 64, "deepgemm": 128}
"""Rows to which a packed expert's block is aligned. DeepGEMM's is its default for the contiguous
layout; the experts member asks the library and makes it agree, or refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPlan:
    """What the transport is built with."""

    name: str
    layout: Layout
    wire: str
    rdma_bytes: int
    """From the formula; on a GPU the library's hint is used and both are recorded."""
    nvl_bytes: int
    """The same for the high-throughput kernels' NVLink buffer; 0 for the others."""
    num_qps: int
    qp_depth: int
    num_sms: int
    """SMs the high-throughput kernels run on; 0 for the others."""
    row_alignment: int
    """Packed layout: rows to which each expert's block is aligned; 0 when masked."""
    received_rows: int
    """Packed layout: rows that can arrive, world_size * max_tokens; 0 when masked."""
    packed_rows: int
    """Packed layout: what those become at worst, each copied to every expert it can have here and
    each block padded; 0 when masked."""
    worst_case_rows: bool
    """received_rows rows always arrive, those nobody sent marked -1: no count is read on the
    host."""
    fused_reduce: bool


def plan_transport(
    config: Config, request: Request, experts: str
) -> tuple[TransportPlan, dict[str, str]]:
    """The plan for a config without problems, and what ``auto`` became."""
    transport, name = config.transport, request.transport
    chosen = {}
    layout = layout_of(config)
    if transport.layout == "auto" and len(LAYOUTS[name]) > 1:
        chosen["transport.layout"] = f"{layout}: what {name} delivers unless asked"
    worst_case = _worst_case(config)
    if transport.worst_case_rows == "auto" and name == "deepep_ht":
        why = "a CUDA graph holds no host wait" if worst_case else "graphs are off"
        chosen["transport.worst_case_rows"] = f"{str(worst_case).lower()}: {why}"
    rows = _rows(config, request, experts) if layout == "packed" else (0, 0, 0)
    low_latency, high_throughput = name == "deepep_ll", name == "deepep_ht"
    nvl, rdma = 0, 0
    if low_latency:
        rdma = limits.low_latency_bytes(request.max_tokens, request.hidden, request.num_experts)
    if high_throughput:
        nvl, rdma = limits_ht.buffer_bytes(request.hidden, request.ep, request.comm_sms)
    plan = TransportPlan(
        name=name,
        layout=layout,
        wire=request.wire,
        rdma_bytes=rdma,
        nvl_bytes=nvl,
        num_qps=_num_qps(request, rdma),
        qp_depth=_qp_depth(request) if low_latency else 0,
        num_sms=request.comm_sms if high_throughput else 0,
        row_alignment=rows[0],
        received_rows=rows[1],
        packed_rows=rows[2],
        worst_case_rows=worst_case,
        fused_reduce=transport.fused_reduce,
    )
    return plan, chosen


def layout_of(config: Config) -> Layout:
    """How rows will be delivered."""
    if config.transport.layout != "auto":
        return config.transport.layout
    return LAYOUTS[config.transport.name][0]


def transport_problems(config: Config, world_size: int) -> list[str]:
    """Choices of the transport section that exclude each other or the graphs."""
    transport, name = config.transport, config.transport.name
    problems = []
    if transport.layout not in ("auto", *LAYOUTS[name]):
        problems.append(
            f"transport.layout: got {transport.layout}; accepted with {name}: auto, "
            f"{', '.join(LAYOUTS[name])}"
        )
    if config.graph.enabled and name == "torch_a2a":
        problems.append(
            "graph.enabled: torch_a2a goes through the host and cannot be captured in a CUDA "
            "graph; accepted: false, or transport.name: deepep_ll or deepep_ht"
        )
    if name == "deepep_ht":
        problems += _worst_case_problems(config, world_size > limits_ht.NODE_RANKS)
    return problems


def packed_rows(received: int, top_k: int, num_experts: int, alignment: int) -> int:
    """Rows that ``received`` rows can become: every choice local, every expert's block padded."""
    routes = received * min(top_k, num_experts)
    padded = routes + min(num_experts, routes) * (alignment - 1)
    return -(-padded // alignment) * alignment


def _worst_case(config: Config) -> bool:
    asked = config.transport.worst_case_rows
    if asked == "auto":
        return config.graph.enabled and config.transport.name == "deepep_ht"
    return asked


def _worst_case_problems(config: Config, several_nodes: bool) -> list[str]:
    only_here = f"worst-case rows exist on one node only (up to {limits_ht.NODE_RANKS} ranks)"
    if config.graph.enabled and (several_nodes or not _worst_case(config)):
        remedy = "" if several_nodes else "transport.worst_case_rows: true, "
        why = f"; {only_here}" if several_nodes else ""
        return [
            "graph.enabled: deepep_ht reads the number of received rows on the host, which a CUDA "
            f"graph cannot hold{why}; accepted: {remedy}graph.enabled: false, or "
            "transport.name: deepep_ll"
        ]
    if several_nodes and _worst_case(config):
        return [f"transport.worst_case_rows: got true; {only_here}; accepted: false"]
    return []


def _rows(config: Config, request: Request, experts: str) -> tuple[int, int, int]:
    """(alignment, received, packed)."""
    asked = config.experts.row_alignment
    alignment = ROW_ALIGNMENT[experts] if asked == "auto" else asked
    received = request.ep * request.max_tokens
    local = request.num_experts // request.ep
    return alignment, received, packed_rows(received, request.top_k, local, alignment)


def _num_qps(request: Request, rdma: int) -> int:
    """A queue pair for each local expert (low latency) or each communication SM (internode)."""
    if rdma == 0:
        return 0
    low_latency = request.transport == "deepep_ll"
    return request.num_experts // request.ep if low_latency else request.comm_sms


def _qp_depth(request: Request) -> int:
    if request.qp_depth_set is not None:
        return request.qp_depth_set
    needed = limits.qp_depth_needed(request.max_tokens)
    depth = limits.QP_DEPTH_DEFAULT
    while depth < needed:
        depth *= 2
    return depth
