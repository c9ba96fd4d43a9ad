"""Experts compute the grouped SwiGLU on rows already home. One file each; list it to add it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from epdecode.batch import Batch, ExpertWeights, Mark
from epdecode.plan import Plan
from epdecode.registry import load_member


class Experts(Protocol):
    """down(silu(gate(x)) * up(x)) per local expert; workspaces are shared by all layers."""

    def prepare(self, weights: ExpertWeights) -> Any:
        """Bring one layer's weights into the form this member reads; called once per layer."""
        ...

    def __call__(self, batch: Batch, weights: Any, mark: Mark) -> torch.Tensor:
        """bfloat16 rows of the batch's shape; anything may stand in rows past the count.

        Marks gate_up_gemm, act_quant and down_gemm as they are enqueued.
        """
        ...


MEMBERS = {
    "torch_loop": "epdecode.experts.torch_loop:TorchLoop",
    "deepgemm": "epdecode.experts.deepgemm:DeepGemm",
}


def build_experts(plan: Plan, device: torch.device) -> Experts:
    """The experts member the plan names, with its workspaces allocated."""
    member: Experts = load_member("experts", MEMBERS, plan.experts.name)(plan, device)
    return member
