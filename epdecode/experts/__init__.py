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

        Marks its stages as they are enqueued: gate_up_gemm, act_quant and down_gemm, without the
        second where the first GEMM does it, or expert_chain where one launch does all.
        """
        ...


MEMBERS = {
    "torch_loop": "epdecode.experts.torch_loop:TorchLoop",
    "deepgemm": "epdecode.experts.deepgemm:DeepGemm",
    "triton_gemm": "epdecode.experts.triton_gemm:TritonGemm",
    "tuned": "epdecode.experts.tuned:TunedExperts",
}
"""Those that take a MaskedBatch."""

PACKED_MEMBERS = {
    "torch_loop": "epdecode.experts.torch_loop_packed:TorchLoopPacked",
    "deepgemm": "epdecode.experts.deepgemm_packed:DeepGemmPacked",
}
"""Those that take a PackedBatch."""

_BY_LAYOUT = {"masked": MEMBERS, "packed": PACKED_MEMBERS}


def load_experts(plan: Plan) -> Any:
    """The class the plan names; raises EnvironmentFault when its library cannot be loaded.

    So too for a library that only some load or the shared expert needs.
    """
    members = _BY_LAYOUT[plan.transport.layout]
    for backend in {*plan.experts.backends, *plan.experts.shared_backends}:
        load_member("experts", members, backend)
    return load_member("experts", members, plan.experts.name)


def build_experts(plan: Plan, device: torch.device) -> Experts:
    """The experts member the plan names, with its workspaces allocated."""
    member: Experts = load_experts(plan)(plan, device)
    return member
