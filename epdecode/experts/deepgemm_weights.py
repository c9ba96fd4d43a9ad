"""What both DeepGEMM members read: FP8 matrices with float32 scales per 128x128 block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epdecode.batch import ExpertWeights, Fp8Rows
from epdecode.errors import ConfigError
from epdecode.models import ModelShape


@dataclass(frozen=True, slots=True)
class Prepared:
    """(data, scales) of each GEMM's weights."""

    gate_up: tuple[torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor]


def require_fp8_weights(model: ModelShape) -> None:
    """Refuse a model whose weights DeepGEMM's FP8 GEMMs cannot read."""
    if model.weight_format != "fp8_block128":
        raise ConfigError(
            f"experts.name: deepgemm takes FP8 weights, {model.name} has {model.weight_format}; "
            "accepted: torch_loop, triton_gemm"
        )


def prepare_weights(weights: ExpertWeights) -> Prepared:
    """The canonical form is the GEMMs' own."""
    if not isinstance(weights.gate_up, Fp8Rows) or not isinstance(weights.down, Fp8Rows):
        raise ConfigError("experts.name: deepgemm takes FP8 weights")
    return Prepared(
        (weights.gate_up.data, weights.gate_up.scales),
        (weights.down.data, weights.down.scales),
    )
