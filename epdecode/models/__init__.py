"""The shape of a model's MoE layer: all that epdecode needs to know of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from epdecode.config import Count, Positive, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """How logits become a route. Field names follow the Hugging Face configs."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Applied to all logits before the choice; see also ``softmax_after_topk``."""
    softmax_after_topk: bool = False
    """Choose by logits, then softmax over the chosen ones only (gpt-oss, Mixtral)."""
    bias: bool = False
    """A per-expert correction, float32, used for the choice only, never for the weights."""
    n_group: Size = 1
    """Equal groups that the experts are divided into; 1 = no groups."""
    topk_group: Size = 1
    """Experts are chosen from the best ``topk_group`` of ``n_group`` equal groups."""
    group_score: Literal["max", "top2_sum"] = "max"
    """A group's score: its best expert (DeepSeek-V2) or the sum of its best two (V3)."""
    norm_topk_prob: bool = True
    """Divide the chosen weights by their sum."""
    routed_scaling_factor: Positive = 1.0
    """Multiplies the weights of the routed experts, after the division."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model's MoE layer; every file in configs/models gives the source of its figures."""

    name: str
    """What results call the model."""
    source: str
    """Where the figures come from."""
    hidden: Size
    """Size of a token's row (hidden_size)."""
    expert_size: Size
    """Intermediate size of one routed expert (moe_intermediate_size)."""
    num_experts: Size
    """Routed experts of a layer."""
    top_k: Size
    """Routed experts of a token."""
    num_shared_experts: Count = 0
    """Shared experts, each of ``expert_size``, run as one expert of their summed size."""
    num_moe_layers: Size
    """MoE layers of the model; a loop can have as many."""
    moe_layers: tuple[Count, ...] = ()
    """The model's own number of each MoE layer, from 0; empty = not known."""
    weight_format: Literal["fp8_block128", "bf16"] = "fp8_block128"
    """fp8_block128 = e4m3 with a float32 scale per block of 128x128."""
    rms_norm_eps: Positive = 1e-6
    """Added to the mean square in the norm before the experts."""
    router: RouterShape = field(default_factory=RouterShape)

    @property
    def shared_size(self) -> int:
        """Intermediate size of all shared experts together; 0 = none."""
        return self.num_shared_experts * self.expert_size
