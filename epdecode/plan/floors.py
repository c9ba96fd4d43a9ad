"""The least a stage can take: bytes to move and operations to do, over the device's rates.

Weights of every expert hit are read once, each received row is read and written once. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from epdecode.models import ModelShape
from epdecode.plan.hardware import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """One stage of one layer on one rank."""

    bytes: int
    flops: int
    floor_us: float | None
    """None without a device."""


def expected_hit(num_experts: int, num_local: int, selections: float) -> float:
    """Local experts that at least one of ``selections`` uniform choices reaches, on average."""
    return num_local * (1.0 - float((1.0 - 1.0 / num_experts) ** selections))


def copies_per_token(layout: str, top_k: int, num_experts: int, num_ranks: int) -> float:
    """Times a token is sent: once per expert when masked, once per rank that holds one of its
    experts when packed (ranks hit on average by top_k distinct uniform choices)."""
    if layout == "masked":
        return top_k
    local = num_experts // num_ranks
    missed = 1.0
    for chosen in range(top_k):
        missed *= max(0, num_experts - local - chosen) / (num_experts - chosen)
    return num_ranks * (1.0 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one layer of one rank has to do.

    tokens: tokens of this rank; copies: times each is sent, fewer than top_k when one copy serves
    all experts of a rank; rows: rows of its experts; experts_hit: local experts with a row.
    """

    tokens: float
    copies: float
    rows: float
    experts_hit: float


def stage_floors(
    model: ModelShape,
    traffic: Traffic,
    *,
    wire_fp8: bool,
    shared_wire: bool,
    device: Device | None,
) -> dict[str, Floor]:
    """Floors of one layer for one rank, of every stage it can have.

    expert_chain: gate-up to down in one launch, whose intermediates need not leave the chip.
    shared_wire: the transport's peers are on this GPU (or it has none), so the wire is device
    memory and not NVLink.
    """
    tokens, rows, experts_hit = traffic.tokens, traffic.rows, traffic.experts_hit
    sent, arrived = tokens * traffic.copies, rows * traffic.copies / model.top_k
    hidden, size = model.hidden, model.expert_size
    weight = 1 if model.weight_format == "fp8_block128" else 2
    message = hidden + hidden // 32 if wire_fp8 else 2 * hidden
    act = size + size // 32 if wire_fp8 else 2 * size
    scale = 1 + 4 / 128**2 if weight == 1 else 1
    gate_up_weights = experts_hit * 2 * size * hidden * weight * scale
    down_weights = experts_hit * size * hidden * weight * scale
    shared = model.shared_size
    moved: dict[str, tuple[float, float]] = {
        "route": (
            tokens * hidden * 2 + model.num_experts * hidden * 2,
            2 * tokens * hidden * model.num_experts,
        ),
        "dispatch_send": (sent * message, 0),
        "dispatch_wait": ((arrived + rows) * message, 0),
        "gate_up_gemm": (
            gate_up_weights + rows * (message + 4 * size),
            4 * rows * hidden * size,
        ),
        "act_quant": (rows * (4 * size + act), 0),
        "down_gemm": (down_weights + rows * (act + 2 * hidden), 2 * rows * hidden * size),
        "expert_chain": (
            gate_up_weights + down_weights + rows * (message + 2 * hidden),
            6 * rows * hidden * size,
        ),
        "combine_send": ((rows + arrived) * 2 * hidden, 0),
        "combine_wait": (sent * 2 * hidden + tokens * 2 * hidden, 0),
        "shared_expert": (
            3 * shared * hidden * weight * scale + tokens * 4 * hidden if shared else 0,
            6 * tokens * hidden * shared,
        ),
    }
    wire = {"dispatch_send", "combine_send"} if not shared_wire else set()
    return {
        stage: Floor(
            bytes=round(size_),
            flops=round(flops),
            floor_us=_microseconds(size_, flops, device, stage in wire),
        )
        for stage, (size_, flops) in moved.items()
    }


def _microseconds(size: float, flops: float, device: Device | None, wire: bool) -> float | None:
    if device is None:
        return None
    bandwidth = device.nvlink_bytes_s if wire else device.hbm_bytes_s
    return 1e6 * max(size / bandwidth, flops / device.fp8_flops_s)


def weight_floor_us(model: ModelShape, experts_hit: float, device: Device | None) -> float | None:
    """Microseconds to stream the weights of the experts hit once: decode's own floor."""
    if device is None:
        return None
    weight = 1 if model.weight_format == "fp8_block128" else 2
    return 1e6 * experts_hit * 3 * model.expert_size * model.hidden * weight / device.hbm_bytes_s
