"""Each model's router at its real size, against its rule written out token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from epdecode.config.load import load_model
from epdecode.kernels.router import router_ref
from epdecode.models import RouterShape
from epdecode.router import rule_of
from tests.small import small_model

TOKENS = 64


def best(values: torch.Tensor, count: int) -> list[int]:
    """Indices of the largest values, the lowest index first among equals."""
    order = sorted(range(len(values)), key=lambda index: (-float(values[index]), index))
    return order[:count]


def deepseek_v2(logits: torch.Tensor, bias: torch.Tensor) -> dict[int, float]:
    """Softmax; the 3 of 8 groups with the best expert; top 6; times 16, not divided."""
    scores = logits.softmax(0)
    groups = best(scores.view(8, -1).amax(1), 3)
    inside = [index // 20 in groups for index in range(160)]
    masked = torch.where(torch.tensor(inside), scores, 0.0)
    return {index: float(scores[index]) * 16.0 for index in best(masked, 6)}


def deepseek_v2_lite(logits: torch.Tensor, bias: torch.Tensor) -> dict[int, float]:
    """Softmax; top 6 of 64; as they are."""
    scores = logits.softmax(0)
    return {index: float(scores[index]) for index in best(scores, 6)}


def deepseek_v3(logits: torch.Tensor, bias: torch.Tensor) -> dict[int, float]:
    """Sigmoid; the 4 of 8 groups whose two best biased scores sum highest; top 8 by biased score;
    weights are the unbiased scores over their sum, times 2.5."""
    scores = logits.sigmoid()
    biased = scores + bias
    sums = torch.tensor([sorted(group.tolist())[-2:] for group in biased.view(8, -1)]).sum(1)
    groups = best(sums, 4)
    inside = torch.tensor([index // 32 in groups for index in range(256)])
    chosen = best(torch.where(inside, biased, -torch.inf), 8)
    total = sum(float(scores[index]) for index in chosen)
    return {index: float(scores[index]) / total * 2.5 for index in chosen}


def sigmoid_flat(top_k: int, factor: float) -> Callable[..., dict[int, float]]:
    """Kimi-K2, GLM-4.5 and MiniMax-M2: as DeepSeek-V3 without groups."""

    def rule(logits: torch.Tensor, bias: torch.Tensor) -> dict[int, float]:
        scores = logits.sigmoid()
        chosen = best(scores + bias, top_k)
        total = sum(float(scores[index]) for index in chosen)
        return {index: float(scores[index]) / total * factor for index in chosen}

    return rule


def qwen3(logits: torch.Tensor, bias: torch.Tensor) -> dict[int, float]:
    """Softmax over all; top 8; divided by their sum."""
    scores = logits.softmax(0)
    chosen = best(scores, 8)
    total = float(scores[chosen].sum())
    return {index: float(scores[index]) / total for index in chosen}


def qwen2(logits: torch.Tensor, bias: torch.Tensor) -> dict[int, float]:
    """Softmax over all; top 8; as they are."""
    scores = logits.softmax(0)
    return {index: float(scores[index]) for index in best(scores, 8)}


def softmax_of_chosen(top_k: int) -> Callable[..., dict[int, float]]:
    """Mixtral, MiniMax-01 and gpt-oss: top-k logits, then softmax over those alone."""

    def rule(logits: torch.Tensor, bias: torch.Tensor) -> dict[int, float]:
        chosen = best(logits, top_k)
        shares = logits[chosen].softmax(0)
        return dict(zip(chosen, shares.tolist(), strict=True))

    return rule


CHOSEN = RouterShape(softmax_after_topk=True)
# name -> (num_experts, top_k, router) where no shape file is shipped, and the rule.
MODELS = {
    "deepseek-v2": (
        (160, 6, RouterShape(n_group=8, topk_group=3, norm_topk_prob=False,
                             routed_scaling_factor=16.0)),
        deepseek_v2,
    ),
    "deepseek-v2-lite": (None, deepseek_v2_lite),
    "deepseek-v3": (None, deepseek_v3),
    "kimi-k2": (None, sigmoid_flat(8, 2.827)),
    "glm-4.5": (None, sigmoid_flat(8, 2.5)),
    "minimax-m2": ((256, 8, RouterShape(scoring="sigmoid", bias=True)), sigmoid_flat(8, 1.0)),
    "qwen3-235b-a22b": (None, qwen3),
    "qwen2-57b-a14b": ((64, 8, RouterShape(norm_topk_prob=False)), qwen2),
    "mixtral-8x7b": ((8, 2, CHOSEN), softmax_of_chosen(2)),
    "minimax-text-01": ((32, 2, CHOSEN), softmax_of_chosen(2)),
    "gpt-oss-120b": (None, softmax_of_chosen(4)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_router_of_a_model(name: str) -> None:
    given, plain = MODELS[name]
    if given is None:
        model = load_model(name)
    else:
        model = small_model(num_experts=given[0], top_k=given[1], router=given[2])
    bias = torch.randn(model.num_experts) * 0.1
    logits = torch.randn(TOKENS, model.num_experts) * 2
    route = router_ref(
        logits,
        bias if model.router.bias else None,
        rule_of(model),
        torch.tensor([TOKENS], dtype=torch.int32),
    )
    for token in range(TOKENS):
        wanted = plain(logits[token].double(), bias.double())
        got = dict(
            zip(route.topk_ids[token].tolist(), route.topk_weights[token].tolist(), strict=True)
        )
        assert got.keys() == wanted.keys()
        assert got == pytest.approx(wanted, rel=1e-5)
