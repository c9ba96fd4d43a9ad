"""The parts of ``doctor --full``: each talks to the other ranks, in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Part:
    """``member``: "module:function" of (World) -> Outcome; ``limit_s`` holds its process too."""

    member: str
    limit_s: float
    gpu: Literal["required", "optional", "unused"] = "required"


PARTS = {
    "full.gloo": Part("epdecode.doctor.parts.gloo:check", 45, gpu="unused"),
    "full.nvshmem": Part("epdecode.doctor.parts.nvshmem:check", 60),
    "full.deepep_ll": Part("epdecode.doctor.parts.deep_ep:check_low_latency", 60),
    "full.deepep_ht": Part("epdecode.doctor.parts.deep_ep:check_high_throughput", 60),
    # The first call compiles.
    "full.deep_gemm": Part("epdecode.doctor.parts.deep_gemm:check", 120),
    "full.bandwidth": Part("epdecode.doctor.parts.bandwidth:check", 60, gpu="optional"),
}
