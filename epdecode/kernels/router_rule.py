"""What a router does with logits, as the kernel and its plain twin understand it; its refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from epdecode.kernels.checks import check

Scoring = Literal["softmax", "sigmoid", "softmax_after_topk"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "softmax_after_topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """How logits become a route; the fields are the model configs' own (RouterShape)."""

    top_k: int
    scoring: Scoring = "softmax"
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


def chooses_by_logit(rule: RouterRule, bias: torch.Tensor | None) -> bool:
    """Is the choice a question of the logits' order alone? Then no rounded score can tie."""
    ordered = bias is None and (rule.n_group == 1 or rule.group_score == "max")
    return rule.scoring == "softmax_after_topk" or ordered


def check_router(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: RouterRule, num_tokens: torch.Tensor
) -> None:
    op = "router"
    check(logits.dim() in (2, 3), op, "logits' rank", logits.dim(), "2 or 3: [parts,] T, experts")
    check(logits.is_floating_point(), op, "logits' dtype", logits.dtype, "a float type")
    check(
        logits.stride(-1) == 1, op, "logits' stride", logits.stride(), "a row's logits contiguous"
    )
    experts = logits.shape[-1]
    check(rule.scoring in SCORINGS, op, "scoring", rule.scoring, ", ".join(SCORINGS))
    good = 0 < rule.n_group <= experts and experts % rule.n_group == 0
    check(good, op, "n_group", rule.n_group, f"a divisor of {experts} experts")
    good = 0 < rule.topk_group <= rule.n_group
    check(good, op, "topk_group", rule.topk_group, f"1 to n_group = {rule.n_group}")
    eligible = experts // rule.n_group * rule.topk_group
    check(0 < rule.top_k <= eligible, op, "top_k", rule.top_k, f"1 to {eligible} eligible experts")
    if bias is not None:
        check(bias.dtype == torch.float32, op, "bias' dtype", bias.dtype, "float32")
        check(tuple(bias.shape) == (experts,), op, "bias' shape", bias.shape, f"({experts},)")
    check(num_tokens.dtype == torch.int32, op, "num_tokens' dtype", num_tokens.dtype, "int32")
    check(num_tokens.numel() == 1, op, "num_tokens' size", num_tokens.numel(), "1")
