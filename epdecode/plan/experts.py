"""The experts' part of the plan: which member, which scales, and what the member cannot take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from epdecode.config import Config
from epdecode.models import ModelShape
from epdecode.plan.hardware import Device
from epdecode.plan.limit_rule import Request

MASKED_TILE = 128
"""Rows of DeepGEMM's largest tile in the masked layout. A tile that starts inside an expert's block
is stored whole, so a capacity that is no multiple of it lets one expert write into the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPlan:
    """What the experts member is built with."""

    name: str
    scale_format: Literal["fp32", "ue8m0"]
    fused_activation: bool
    fused_quant_layout: bool
    workspace_bytes: tuple[int, int] = (0, 0)
    """Packed rows: the two workspaces that all stages and layers share (workspaces.py)."""


def choose_experts(
    config: Config, model: ModelShape, layout: str, device: Device | None
) -> tuple[ExpertsPlan, dict[str, str]]:
    """The plan for a config without problems, and what ``auto`` became.

    model: as it runs, so that its weight format is the one the GEMMs read.
    """
    chosen = {}
    name: str = config.experts.name
    scales = config.experts.scale_format
    gpu = config.transport.name != "torch_a2a" or device is not None
    if name == "auto":
        name, why = _auto(gpu, model.weight_format, layout)
        chosen["experts.name"] = f"{name}: {why}"
    if scales == "auto":
        scales = "ue8m0" if gpu and _capability(device) >= (10, 0) else "fp32"
        chosen["experts.scale_format"] = f"{scales}: compute capability {_capability(device)}"
    plan = ExpertsPlan(
        name=name,
        scale_format=scales,
        fused_activation=config.experts.fused_activation,
        fused_quant_layout=config.experts.fused_quant_layout,
    )
    return plan, chosen


def _auto(gpu: bool, weight_format: str, layout: str) -> tuple[str, str]:
    if not gpu:
        return "torch_loop", "no GPU"
    if weight_format != "bf16":
        return "deepgemm", "FP8 weights on a GPU"
    if layout == "masked":
        return "triton_gemm", "DeepGEMM's FP8 GEMMs do not take bf16 weights"
    return "torch_loop", "no other member takes packed rows with bf16 weights"


def experts_problems(
    experts: ExpertsPlan, layout: str, request: Request, weight_format: str, device: Device | None
) -> list[str]:
    """What the chosen member cannot take."""
    if experts.name != "deepgemm":
        return []
    problems = []
    world_size, max_tokens = request.ep, request.max_tokens
    if weight_format == "bf16":
        problems.append(
            "experts.name: deepgemm takes FP8 weights, these are bf16; accepted: auto, "
            "triton_gemm, torch_loop, or weights.format: fp8_block128"
        )
    major, minor = _capability(device)
    if experts.scale_format == "ue8m0" and major < 10:
        problems.append(
            f"experts.scale_format: got ue8m0 with deepgemm on compute capability {major}.{minor};"
            " DeepGEMM takes packed scales from 10.0, accepted here: fp32"
        )
    capacity = world_size * max_tokens
    if layout == "masked" and capacity % MASKED_TILE:
        good = next(
            tokens
            for tokens in range(max_tokens, max_tokens + MASKED_TILE)
            if world_size * tokens % MASKED_TILE == 0
        )
        problems.append(
            f"transport.max_tokens_per_rank: {world_size} ranks x {max_tokens} tokens give each "
            f"expert {capacity} rows; DeepGEMM's masked tiles need a multiple of {MASKED_TILE}, or "
            f"one expert writes into the next: nearest {good}, or experts.name: triton_gemm"
        )
    return problems


def _capability(device: Device | None) -> tuple[int, int]:
    return device.capability if device else (9, 0)
