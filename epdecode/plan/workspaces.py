"""Workspaces of the experts: bytes that all stages and layers share. Pure.

Masked rows: each backend has its own. Packed rows: two, and the larger tenant of each decides.

fused activation    first: gate-up output, then down output
                    second: quantised rows of a bfloat16 wire, then the quantised activation
plain activation    first: gate-up output, then the quantised activation
                    second: quantised rows of a bfloat16 wire, then the activation, then down output
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epdecode.models import ModelShape

MOST_SPLITS = 8
"""Parts of K that a gate-up tile of the fused chain can have."""
MOST_PARTIALS = 16 << 20
"""Bytes of the sums of parts: loads that would need more take whole tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """What decides who lives where."""

    rows: int
    hidden: int
    expert_size: int
    quantise_rows: bool
    """Rows arrive in bfloat16 and the weights are FP8."""
    fused_activation: bool
    fused_quant_layout: bool


def masked_bytes(backends: Sequence[str], model: ModelShape, *, rows: int, wire: str) -> int:
    """Bytes for ``rows`` rows in all experts' blocks: what each backend keeps, its output too."""
    fp8 = model.weight_format == "fp8_block128"
    size = model.expert_size
    arriving = quantised_bytes(rows, model.hidden) if fp8 and wire == "bf16" else 0
    activation = arriving + (quantised_bytes(rows, size) if fp8 else 2 * rows * size)
    kept = {
        "torch_loop": 0,
        "triton_gemm": activation + (chain_partials(rows, size) if fp8 else 0),
        "deepgemm": activation + 4 * rows * size,
    }
    return sum(kept[backend] + 2 * rows * model.hidden for backend in backends)


def chain_partials(rows: int, size: int) -> int:
    """Bytes the fused chain keeps for sums of parts of K: kernels.expert_chain.empty_space."""
    return min(MOST_PARTIALS, 8 * MOST_SPLITS * rows * size)


def workspace_bytes(
    name: str,
    model: ModelShape,
    *,
    rows: int,
    wire: str,
    fused_activation: bool,
    fused_quant_layout: bool,
) -> tuple[int, int]:
    """(first, second) for the experts member ``name``."""
    tenants = Tenants(
        rows=rows,
        hidden=model.hidden,
        expert_size=model.expert_size,
        quantise_rows=wire == "bf16" and model.weight_format == "fp8_block128",
        fused_activation=fused_activation,
        fused_quant_layout=fused_quant_layout,
    )
    return _BY_MEMBER.get(name, _two)(tenants)


def quantised_bytes(rows: int, size: int) -> int:
    """e4m3 rows with a 4-byte scale per 128 values (a quarter of that when packed)."""
    return rows * (size + size // 32)


def _two(t: Tenants) -> tuple[int, int]:
    gate_up, out = 4 * t.rows * t.expert_size, 2 * t.rows * t.hidden
    rows = quantised_bytes(t.rows, t.hidden) if t.quantise_rows else 0
    activation = quantised_bytes(t.rows, t.expert_size)
    if not t.fused_activation:
        return max(gate_up, activation), max(rows, 4 * t.rows * t.expert_size, out)
    if not t.fused_quant_layout:
        activation += t.rows * t.expert_size // 32
    return max(gate_up, out), max(rows, activation)


def _output_only(t: Tenants) -> tuple[int, int]:
    """torch_loop takes one expert at a time and lets torch allocate the rest."""
    return 2 * t.rows * t.hidden, 0


_BY_MEMBER: dict[str, Callable[[Tenants], tuple[int, int]]] = {"torch_loop": _output_only}
