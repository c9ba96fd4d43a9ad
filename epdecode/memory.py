"""Bytes a rank takes on its GPU, by category. Pure."""

from __future__ import annotations

from epdecode import limits
from epdecode.config import Config
from epdecode.hardware import GIB, Device
from epdecode.models import ModelShape

CONTEXT_BYTES = 1 * GIB
"""CUDA context, loaded modules and cuBLAS workspace of one process (measured: 0.6 to 0.9 GiB)."""
NVSHMEM_GRANULARITY = 512 << 20
"""NVSHMEM_CUMEM_GRANULARITY as DeepEP sets it: the symmetric heap grows in these steps."""
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
    config: Config, model: ModelShape, request: limits.Request, rdma_bytes: int
) -> dict[str, int]:
    """Bytes by category for one rank.

    The worst case is the plan: every buffer has room for all tokens of all ranks on one expert.
    """
    num_local = request.num_experts // request.ep
    received = num_local * request.ep * request.max_tokens
    hidden, size = model.hidden, model.expert_size
    message = hidden + hidden // 32 if request.wire == "fp8" else 2 * hidden
    activation = size + size // 32 if model.weight_format == "fp8_block128" else 2 * size
    shared = 3 * model.shared_size * hidden * (1 if model.weight_format == "fp8_block128" else 2)
    gate = 2 * model.num_experts * hidden
    categories = {
        "weights": config.layers * (weight_bytes(model, num_local) + shared + gate),
        "receive": received * message,
        "workspaces": received * (4 * size + activation + 2 * hidden),
        "activations": 24 * (config.layers + 2) * request.max_tokens * hidden
        + 16 * request.max_tokens * model.num_experts,
    }
    if config.run.verify:
        categories["verification"] = (
            3 * 4 * size * hidden + 3 * 4 * request.ep * request.max_tokens * hidden
        )
    if request.transport == "deepep_ll":
        granules = -(-rdma_bytes // NVSHMEM_GRANULARITY)
        categories["transport_buffer"] = granules * NVSHMEM_GRANULARITY + DEEPEP_WORKSPACE
        categories["context"] = CONTEXT_BYTES
    return categories


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
