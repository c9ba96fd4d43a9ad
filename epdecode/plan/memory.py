"""Bytes a rank takes on its GPU, by category. Pure."""

from __future__ import annotations

from dataclasses import replace

from epdecode.config import Config
from epdecode.models import ModelShape
from epdecode.plan.expert_site import shared_capacity
from epdecode.plan.experts import ExpertsPlan
from epdecode.plan.hardware import GIB, Device
from epdecode.plan.limit_rule import Request
from epdecode.plan.transport import TransportPlan
from epdecode.plan.workspaces import masked_bytes

CONTEXT_BYTES = {"deepep_ll": 768 << 20, "deepep_ht": 800 << 20}
"""CUDA context, loaded modules, cuBLAS workspaces and what the allocator cannot give back, of one
process. Measured on one H200: the context alone is 527 MiB; at their end whole runs took 391 to 639
MiB beyond the other categories (deepep_ll, one rank), 604 to 757 MiB (deepep_ht, 8, 4 and 2 ranks).
Verification's share has been given back by then, at least in part, so this is more."""
NVSHMEM_GRANULARITY = 512 << 20
"""NVSHMEM_CUMEM_GRANULARITY as DeepEP sets it: the symmetric heap grows in these steps."""
NVSHMEM_INTERNAL = 256 << 20
"""What NVSHMEM itself takes of the symmetric heap before it is rounded up to its steps."""
NVSHMEM_OUTSIDE = {"alone": 2508 << 20, "peers": 300 << 20}
"""And what it takes beside the heap. Measured on one H200 with NVSHMEM 3.4.5: buffers of 228 and
1820 MiB took 3052 and 5100 MiB with one rank, 2860 each for 1820 MiB with 2, 4 and 8 ranks."""
DEEPEP_WORKSPACE = 32 << 20


def weight_bytes(model: ModelShape, num_experts: int) -> int:
    """Bytes of ``num_experts`` routed experts of one layer, with 128x128 scales where FP8."""
    gate_up = _matrix_bytes(2 * model.expert_size, model.hidden, model.weight_format)
    down = _matrix_bytes(model.hidden, model.expert_size, model.weight_format)
    return num_experts * (gate_up + down)


def _matrix_bytes(rows: int, columns: int, weight_format: str) -> int:
    if weight_format == "bf16":
        return 2 * rows * columns
    return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)


def of_rank(
    config: Config,
    model: ModelShape,
    request: Request,
    transport: TransportPlan,
    experts: ExpertsPlan,
) -> dict[str, int]:
    """Bytes by category for one rank.

    The worst case is the plan: every buffer has room for all tokens of all ranks on one rank.
    """
    num_local = request.num_experts // request.ep
    hidden, size = model.hidden, model.expert_size
    shared = 3 * model.shared_size * hidden * (1 if model.weight_format == "fp8_block128" else 2)
    gate = 2 * model.num_experts * hidden
    categories = {
        "weights": config.num_layers * (weight_bytes(model, num_local) + shared + gate),
        **_LAYOUTS[transport.layout](config, model, request, transport, experts),
        "activations": 24 * (config.num_layers + 2) * request.max_tokens * hidden
        + 16 * request.max_tokens * model.num_experts,
    }
    categories["workspaces"] += _beside_routed(config, model, request, transport, experts)
    if config.run.verify:
        categories["verification"] = (
            3 * 4 * size * hidden + 3 * 4 * request.ep * request.max_tokens * hidden
        )
    if transport.name.startswith("deepep"):
        categories["transport_buffer"] = (
            _symmetric_heap(transport, request.ep) + transport.nvl_bytes + DEEPEP_WORKSPACE
        )
        categories["context"] = CONTEXT_BYTES[transport.name]
    return categories


def _symmetric_heap(transport: TransportPlan, world_size: int) -> int:
    if not transport.rdma_bytes:
        return 0
    granules = -(-(transport.rdma_bytes + NVSHMEM_INTERNAL) // NVSHMEM_GRANULARITY)
    outside = NVSHMEM_OUTSIDE["alone" if world_size == 1 else "peers"]
    return granules * NVSHMEM_GRANULARITY + outside


def _message(model: ModelShape, wire: str) -> int:
    """Bytes of a dispatched row, scales included."""
    return model.hidden + model.hidden // 32 if wire == "fp8" else 2 * model.hidden


def _masked(
    config: Config,
    model: ModelShape,
    request: Request,
    transport: TransportPlan,
    experts: ExpertsPlan,
) -> dict[str, int]:
    received = request.num_experts * request.max_tokens
    return {
        "receive": received * _message(model, transport.wire),
        "workspaces": masked_bytes(experts.backends, model, rows=received, wire=transport.wire),
    }


def _packed(
    config: Config,
    model: ModelShape,
    request: Request,
    transport: TransportPlan,
    experts: ExpertsPlan,
) -> dict[str, int]:
    """A graph keeps the received rows of every layer: they were in use on two streams."""
    received, rows = transport.received_rows, transport.packed_rows
    message = _message(model, transport.wire)
    arrival = received * (message + 12 * model.top_k + 4)
    categories = {
        "receive": arrival * (config.num_layers if config.graph.enabled else 2),
        "packing": rows * (message + 8)
        + received * (2 * model.hidden + 4 * model.top_k)
        + (request.max_tokens * message if transport.wire == "fp8" else 0),
        "workspaces": sum(experts.workspace_bytes),
    }
    if not transport.fused_reduce:
        categories["reduce"] = received * model.top_k * model.hidden * 10
    return categories


def _beside_routed(
    config: Config,
    model: ModelShape,
    request: Request,
    transport: TransportPlan,
    experts: ExpertsPlan,
) -> int:
    """The step's static input, and the shared expert's rows and workspaces: a group of one."""
    inputs = 2 * max(config.batch.buckets) * model.hidden
    if not model.shared_size:
        return inputs
    rows = shared_capacity(request.max_tokens)
    fp8 = model.weight_format == "fp8_block128"
    wire = transport.wire if fp8 else "bf16"
    wide = replace(model, expert_size=model.shared_size)
    kept = masked_bytes(experts.shared_backends, wide, rows=rows, wire=wire)
    return inputs + rows * _message(model, wire) + kept


_LAYOUTS = {"masked": _masked, "packed": _packed}


def does_not_fit(
    categories: dict[str, int], device: Device | None, ranks_per_gpu: int
) -> str | None:
    """What to lower when ``ranks_per_gpu`` ranks of these categories exceed the device."""
    needed = ranks_per_gpu * sum(categories.values())
    if device is None or needed <= device.memory_bytes:
        return None
    parts = ", ".join(
        f"{name} {size / GIB:.1f}"
        for name, size in sorted(categories.items(), key=lambda item: -item[1])
    )
    return (
        f"memory: {ranks_per_gpu} rank(s) on one {device.name} need {needed / GIB:.1f} GiB of "
        f"{device.memory_bytes / GIB:.1f} GiB; a rank's share in GiB: {parts}. "
        "Lower layers or transport.max_tokens_per_rank, or use more GPUs"
    )
