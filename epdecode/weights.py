"""Weights seeded by global expert id: the same for any world size, never all on one rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from epdecode.batch import ExpertWeights, Fp8Rows, Rows
from epdecode.kernels.fp8 import quantize_block
from epdecode.models import ModelShape


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One MoE layer on one rank.

    norm: bfloat16 [H]; gate: bfloat16 [num_experts, H]; bias: float32 [num_experts] or None;
    experts: the rank's; shared: one expert of the shared size, or None.
    """

    norm: torch.Tensor
    gate: torch.Tensor
    bias: torch.Tensor | None
    experts: ExpertWeights
    shared: ExpertWeights | None


def generator(device: torch.device, *names: object) -> torch.Generator:
    """A generator seeded by names, so that a tensor's values depend on what it is alone."""
    digest = hashlib.sha256(repr(names).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def seeded_layer(
    model: ModelShape, layer: int, local_experts: range, seed: int, device: torch.device
) -> LayerWeights:
    """Random weights of one layer; matrices have unit gain (standard deviation 1/sqrt(inputs))."""
    gate = _normal((model.num_experts, model.hidden), model.hidden, device, seed, layer, "gate")
    bias = None
    if model.router.bias:
        bias = 0.05 * torch.randn(
            model.num_experts, device=device, generator=generator(device, seed, layer, "bias")
        )
    norm = 1 + 0.1 * torch.randn(
        model.hidden, device=device, generator=generator(device, seed, layer, "norm")
    )
    shared = None
    if model.shared_size:
        shared = _experts(model, model.shared_size, ["shared"], device, seed, layer)
    return LayerWeights(
        norm=norm.to(torch.bfloat16),
        gate=gate.to(torch.bfloat16),
        bias=bias,
        experts=_experts(model, model.expert_size, list(local_experts), device, seed, layer),
        shared=shared,
    )


def _experts(
    model: ModelShape,
    size: int,
    names: list[object],
    device: torch.device,
    seed: int,
    layer: int,
) -> ExpertWeights:
    """Made one matrix at a time: a whole layer in float32 would not fit beside it."""
    gate_up = _empty((len(names), 2 * size, model.hidden), model.weight_format, device)
    down = _empty((len(names), model.hidden, size), model.weight_format, device)
    for index, name in enumerate(names):
        for target, kind in ((gate_up, "gate_up"), (down, "down")):
            rows, columns = (target.data if isinstance(target, Fp8Rows) else target).shape[1:]
            made = _normal((rows, columns), columns, device, seed, layer, kind, name)
            _store(target, index, made)
    return ExpertWeights(gate_up, down)


def _store(target: Rows, index: int, made: torch.Tensor) -> None:
    if isinstance(target, Fp8Rows):
        quantised = quantize_block(made)
        target.data[index] = quantised.data
        target.scales[index] = quantised.scales
    else:
        target[index] = made.to(torch.bfloat16)


def _empty(shape: tuple[int, int, int], weight_format: str, device: torch.device) -> Rows:
    if weight_format == "bf16":
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    blocks = (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))
    return Fp8Rows(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(blocks, dtype=torch.float32, device=device),
    )


def _normal(
    shape: tuple[int, int], inputs: int, device: torch.device, *names: object
) -> torch.Tensor:
    made = torch.randn(shape, device=device, generator=generator(device, *names))
    return made.mul_(inputs**-0.5)
