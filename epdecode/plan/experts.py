"""The experts' part of the plan: which member, which scales, and what the member cannot take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from epdecode.plan.expert_loads import (
    Load,
    backends_of,
    describe,
    loads_of,
    routed_rows,
    shared_shape,
)
from epdecode.plan.expert_site import MASKED_TILE, Site, capability_of, shared_capacity
from epdecode.plan.hardware import Device
from epdecode.plan.limit_rule import Request
from epdecode.plan.transport import layout_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPlan:
    """What the experts member is built with."""

    name: str
    scale_format: Literal["fp32", "ue8m0"]
    fused_activation: bool
    fused_quant_layout: bool
    workspace_bytes: tuple[int, int] = (0, 0)
    """Packed rows: the two workspaces that all stages and layers share (workspaces.py)."""
    loads: tuple[Load, ...] = ()
    """triton_gemm and tuned: what each bucket of the routed experts runs on."""
    shared_loads: tuple[Load, ...] = ()
    """The same for the shared expert."""
    shared_in_line: bool = False
    """The shared expert does not run beside the routed ones: both take the one-kernel chain, whose
    programs fill whole SMs, so that two at once slow each other."""

    @property
    def backends(self) -> tuple[str, ...]:
        """What the routed experts are built of."""
        return backends_of(self.loads) if self.name == "tuned" else (self.name,)

    @property
    def shared_backends(self) -> tuple[str, ...]:
        """What the shared expert is built of."""
        return backends_of(self.shared_loads) if self.name == "tuned" else (self.name,)


def choose_experts(site: Site) -> tuple[ExpertsPlan, dict[str, str]]:
    """The plan for a config without problems, and what ``auto`` became.

    site.model: as it runs, so that its weight format is the one the GEMMs read.
    """
    experts, layout = site.config.experts, layout_of(site.config)
    name: str = experts.name
    chosen = {}
    if name == "auto":
        name, why = _auto(layout, site)
        chosen["experts.name"] = f"{name}: {why}"
    if experts.scale_format == "auto":
        why = f"compute capability {capability_of(site.device)}"
        chosen["experts.scale_format"] = f"{site.scale_format}: {why}"
    plan = ExpertsPlan(
        name=name,
        scale_format=site.scale_format,
        fused_activation=experts.fused_activation,
        fused_quant_layout=experts.fused_quant_layout,
    )
    if name in ("triton_gemm", "tuned") and layout == "masked":
        plan, listed = _with_loads(plan, site)
        chosen |= listed
    return plan, chosen


def _auto(layout: str, site: Site) -> tuple[str, str]:
    if not site.on_gpu:
        return "torch_loop", "no GPU"
    fp8 = site.model.weight_format != "bf16"
    if layout == "packed":
        if fp8:
            return "deepgemm", "FP8 weights and packed rows on a GPU"
        return "torch_loop", "no other member takes packed rows with bf16 weights"
    if not fp8:
        return "triton_gemm", "DeepGEMM's FP8 GEMMs do not take bf16 weights"
    if why := site.why_two_kernels(site.shape, site.capacity):
        return "deepgemm", f"FP8 weights on a GPU; no one-kernel chain: {why}"
    return "tuned", "FP8 weights on Hopper: for each bucket the faster backend"


def _with_loads(plan: ExpertsPlan, site: Site) -> tuple[ExpertsPlan, dict[str, str]]:
    """The plan with its loads, and the lines that list them."""
    buckets, table = site.config.batch.buckets, site.kernels.table
    no_rival = site.why_no_deepgemm(site.capacity) if plan.name == "tuned" else "not asked for"
    plan = replace(
        plan,
        loads=loads_of(
            site.shape,
            buckets,
            partial(routed_rows, site.request),
            table,
            spread=site.spread,
            rival=not no_rival,
        ),
    )
    chosen = {"experts.loads": describe(plan.loads)}
    if plan.name == "tuned" and no_rival:
        chosen["experts.loads"] += f"; without DeepGEMM: {no_rival}"
    if site.model.shared_size:
        plan = _with_shared(plan, site)
        chosen["experts.shared_loads"] = describe(plan.shared_loads)
    if plan.shared_in_line and site.config.overlap.shared_expert:
        chosen["overlap.shared_expert"] = (
            "off: two chains of one kernel each, run at once, slow each other"
        )
    return plan, chosen


def _with_shared(plan: ExpertsPlan, site: Site) -> ExpertsPlan:
    shape, capacity = shared_shape(site.model), shared_capacity(site.request.max_tokens)
    rival = plan.name == "tuned" and not site.why_no_deepgemm(capacity)
    buckets, table = site.config.batch.buckets, site.kernels.table
    loads = loads_of(shape, buckets, lambda tokens: tokens, table, spread="even", rival=rival)
    both = (
        "triton_gemm" in backends_of(plan.loads)
        and not site.why_two_kernels(site.shape, site.capacity)
        and not site.why_two_kernels(shape, capacity)
    )
    if both and rival and site.config.overlap.shared_expert:
        loads = tuple(_beside(load) for load in loads)
    clash = both and "triton_gemm" in backends_of(loads)
    return replace(plan, shared_loads=loads, shared_in_line=clash)


def _beside(load: Load) -> Load:
    """DeepGEMM, whose programs wait for nobody."""
    if load.choice.backend == "deepgemm":
        return load
    return replace(load, choice=replace(load.choice, backend="deepgemm"), source="overlap")


def experts_problems(
    experts: ExpertsPlan, layout: str, request: Request, weight_format: str, device: Device | None
) -> list[str]:
    """What the chosen member cannot take."""
    if layout == "packed" and experts.name in ("triton_gemm", "tuned"):
        return [
            f"experts.name: {experts.name} takes no packed rows; accepted with "
            f"{request.transport}: auto, deepgemm, torch_loop"
        ]
    if experts.name in ("triton_gemm", "tuned"):
        return _one_format(experts.name, request.wire, weight_format)
    if experts.name != "deepgemm":
        return []
    problems = []
    world_size, max_tokens = request.ep, request.max_tokens
    if weight_format == "bf16":
        problems.append(
            "experts.name: deepgemm takes FP8 weights, these are bf16; accepted: auto, "
            "triton_gemm, torch_loop, or weights.format: fp8_block128"
        )
    major, minor = capability_of(device)
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


def _one_format(name: str, wire: str, weight_format: str) -> list[str]:
    """Our kernels multiply rows and weights of one format; rows of an FP8 wire stay FP8."""
    if weight_format != "bf16" or wire == "bf16":
        return []
    return [
        f"transport.wire: got {wire} with bf16 weights and experts.name: {name}; accepted: bf16, "
        "or weights.format: fp8_block128, or experts.name: torch_loop"
    ]
