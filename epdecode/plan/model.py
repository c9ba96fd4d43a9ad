"""The model's shape as it runs: its share of the experts, weight format and padded size. Pure."""

from __future__ import annotations

from dataclasses import replace

from epdecode.config import Config
from epdecode.models import ModelShape

BLOCK = 128
"""Side of an FP8 weight block, and the group over which activations are scaled."""


def effective_model(config: Config, model: ModelShape, world_size: int) -> ModelShape:
    """The shape that is built.

    num_experts: this world's share with parallel.stand_in_ep. expert_size: FP8 blocks need a
    multiple of 128, so gate, up and down are padded with zeros, which add nothing to an output.
    """
    stand_in, wanted = config.parallel.stand_in_ep, config.weights.format
    weight_format = model.weight_format if wanted == "auto" else wanted
    size = model.expert_size
    return replace(
        model,
        num_experts=model.num_experts // stand_in * world_size if stand_in else model.num_experts,
        weight_format=weight_format,
        expert_size=-(-size // BLOCK) * BLOCK if weight_format == "fp8_block128" else size,
    )


def model_problems(config: Config, model: ModelShape, world_size: int) -> list[str]:
    """What of the shape cannot be built as the config asks."""
    problems = []
    stand_in, wanted = config.parallel.stand_in_ep, config.weights.format
    if stand_in is not None and (
        stand_in < world_size or stand_in % world_size or model.num_experts % stand_in
    ):
        problems.append(
            f"parallel.stand_in_ep: got {stand_in} with {world_size} ranks and {model.num_experts}"
            f" experts; accepted: a multiple of {world_size} that divides {model.num_experts}"
        )
    weight_format = model.weight_format if wanted == "auto" else wanted
    if weight_format == "fp8_block128" and model.hidden % BLOCK:
        problems.append(
            f"weights.format: got {wanted} with hidden {model.hidden}, no multiple of {BLOCK}; "
            "accepted: bf16"
        )
    return problems


def model_choices(model: ModelShape, effective: ModelShape) -> dict[str, str]:
    """What was chosen for the shape, and why."""
    chosen = {}
    if effective.expert_size != model.expert_size:
        chosen["expert_size"] = (
            f"{effective.expert_size}: {model.expert_size} padded to blocks of {BLOCK}"
        )
    return chosen
