"""What the choice of expert kernels follows from, and what keeps each kernel from running. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from epdecode.config import Config
from epdecode.models import ModelShape
from epdecode.plan.expert_choice import ExpertShape, Spread
from epdecode.plan.expert_loads import ASSUMED, Kernels, why_not_one_kernel
from epdecode.plan.hardware import Device
from epdecode.plan.limit_rule import Request

MASKED_TILE = 128
"""Rows of DeepGEMM's largest tile in the masked layout. A tile that starts inside an expert's block
is stored whole, so a capacity that is no multiple of it lets one expert write into the next."""

SPREADS: dict[str, Spread] = {"balanced": "even", "uniform": "drawn", "model": "drawn"}
"""Routing kinds whose loads are not skewed."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the choice of kernels follows from."""

    config: Config
    model: ModelShape
    request: Request
    device: Device | None
    kernels: Kernels = ASSUMED

    @property
    def on_gpu(self) -> bool:
        """The job wants a GPU, whether one is at hand or not."""
        return self.config.transport.name != "torch_a2a" or self.device is not None

    @property
    def scale_format(self) -> Literal["fp32", "ue8m0"]:
        """Of quantised activations: what is asked for, else what the GPU's GEMM takes."""
        asked = self.config.experts.scale_format
        if asked != "auto":
            return asked
        return "ue8m0" if self.on_gpu and capability_of(self.device) >= (10, 0) else "fp32"

    @property
    def shape(self) -> ExpertShape:
        """The routed experts of a rank."""
        local = self.request.num_experts // self.request.ep
        return ExpertShape(experts=local, hidden=self.model.hidden, size=self.model.expert_size)

    @property
    def spread(self) -> Spread:
        """How the routing spreads rows over experts."""
        return SPREADS.get(self.config.routing.kind, "skewed")

    @property
    def capacity(self) -> int:
        """Rows of an expert's block."""
        return self.request.ep * self.request.max_tokens

    def why_two_kernels(self, shape: ExpertShape, capacity: int) -> str:
        """What keeps the one-kernel chain from running; empty when nothing does."""
        if self.model.weight_format != "fp8_block128":
            return "weights are bfloat16"
        if not self.on_gpu:
            return "no GPU"
        return why_not_one_kernel(
            shape,
            capacity,
            packed_scales=self.scale_format == "ue8m0",
            capability=capability_of(self.device),
        )

    def why_no_deepgemm(self, capacity: int) -> str:
        """What keeps DeepGEMM from taking a load; empty when nothing does."""
        checks = {
            "it is not installed": self.kernels.deepgemm,
            "it takes FP8 weights only": self.model.weight_format == "fp8_block128",
            "it takes no packed scales before compute capability 10.0": (
                self.scale_format == "fp32" or capability_of(self.device) >= (10, 0)
            ),
            f"capacity {capacity} is no multiple of its {MASKED_TILE}-row tiles": (
                capacity % MASKED_TILE == 0
            ),
        }
        return "; ".join(what for what, good in checks.items() if not good)


def shared_capacity(max_tokens: int) -> int:
    """Rows of the shared expert's block: whole GEMM tiles."""
    return -(-max_tokens // MASKED_TILE) * MASKED_TILE


def capability_of(device: Device | None) -> tuple[int, int]:
    """Hopper's where the device is not known."""
    return device.capability if device else (9, 0)
