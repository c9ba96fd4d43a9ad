"""router equals router_ref: same ids always, same weights; NaN, ties, groups, padded rows."""

from __future__ import annotations

import pytest
import torch

from epdecode.errors import ConfigError
from epdecode.kernels.router import RouterRule, router, router_ref
from epdecode.kernels.router_rule import SCORINGS
from tests.kernels.kit import both

GROUPINGS = {
    # experts, top_k, n_group, topk_group, group_score
    "deepseek-v3": (256, 8, 8, 4, "top2_sum"),
    "deepseek-v2": (160, 6, 8, 3, "max"),
    "flat": (128, 8, 1, 1, "max"),
    "odd": (72, 6, 1, 1, "max"),
    "tiny": (8, 2, 1, 1, "max"),
    "groups-of-one": (4, 2, 4, 2, "top2_sum"),
    "odd-groups": (12, 3, 4, 2, "top2_sum"),
}


def rule_of(name: str, scoring: str = "sigmoid", **fields) -> tuple[int, RouterRule]:
    experts, top_k, n_group, topk_group, group_score = GROUPINGS[name]
    return experts, RouterRule(
        top_k=top_k,
        scoring=scoring,
        n_group=n_group,
        topk_group=topk_group,
        group_score=group_score,
        **fields,
    )


def count(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([tokens], dtype=torch.int32, device=device)


def assert_equal(logits, bias, rule, num_tokens, exact):
    got = router(logits, bias, rule, num_tokens)
    want = router_ref(logits, bias, rule, num_tokens)
    assert torch.equal(got.topk_ids, want.topk_ids)
    if exact:
        assert torch.equal(got.topk_weights, want.topk_weights)
    torch.testing.assert_close(got.topk_weights, want.topk_weights, rtol=2e-6, atol=1e-8)
    return got


@both
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_equals_ref(exact, scoring, grouping, biased, device):
    experts, rule = rule_of(grouping, scoring, routed_scaling_factor=2.5)
    tokens = 300 if exact else 5
    bias = torch.randn(experts, device=device) * 0.1 if biased else None
    logits = torch.randn(tokens, experts, device=device) * 2
    assert_equal(logits, bias, rule, count(tokens - 1, device), exact)


@both
@pytest.mark.parametrize("scoring", SCORINGS)
def test_ties_go_to_the_lowest_id(exact, scoring, device):
    _, rule = rule_of("flat", scoring)
    logits = torch.zeros(3, 128, device=device)
    logits[1] = -0.0
    logits[2, 5::3] = 1.0
    got = assert_equal(logits, None, rule, count(3, device), exact)
    assert got.topk_ids[:2].tolist() == [list(range(8))] * 2
    assert got.topk_ids[2].tolist() == list(range(5, 29, 3))


@both
@pytest.mark.parametrize("grouping", ["deepseek-v3", "odd"])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_ids_are_distinct_and_valid_or_all_absent(exact, grouping, scoring, device):
    experts, rule = rule_of(grouping, scoring)
    bad = [torch.nan, torch.inf, -torch.inf, 3e38, -3e38]
    logits = torch.randn(2 * len(bad) + 1, experts, device=device)
    for row, value in enumerate(bad):
        logits[row, 3] = value
        logits[len(bad) + row] = value
    got = assert_equal(logits, None, rule, count(len(logits), device), exact)
    for ids, weights in zip(got.topk_ids.tolist(), got.topk_weights.tolist(), strict=True):
        absent = ids == [-1] * rule.top_k and weights == [0.0] * rule.top_k
        valid = len(set(ids)) == rule.top_k and min(ids) >= 0 and max(ids) < experts
        assert absent or valid
    assert got.topk_weights.isfinite().all()
    assert got.topk_ids[0].tolist() == [-1] * rule.top_k
    assert got.topk_ids[-1].min() >= 0


@both
def test_a_nan_bias_routes_nowhere(exact, device):
    experts, rule = rule_of("deepseek-v3")
    bias = torch.zeros(experts, device=device)
    bias[9] = torch.nan
    got = assert_equal(torch.randn(2, experts, device=device), bias, rule, count(2, device), exact)
    assert (got.topk_ids == -1).all()


@both
def test_padded_rows_get_no_expert_whatever_they_hold(exact, device):
    experts, rule = rule_of("flat", "softmax")
    logits = torch.randn(6, experts, device=device)
    logits[4:] = torch.nan
    for tokens in (4, 0, 2):
        got = assert_equal(logits, None, rule, count(tokens, device), exact)
        assert (got.topk_ids[:tokens] >= 0).all()
        assert (got.topk_ids[tokens:] == -1).all()
        assert (got.topk_weights[tokens:] == 0).all()


def test_deepseek_v3_rule_in_its_own_words(device):
    experts, rule = rule_of("deepseek-v3", routed_scaling_factor=2.5)
    logits, bias = torch.randn(64, experts, device=device), torch.randn(experts, device=device) / 9
    scores = logits.sigmoid()
    choice = (scores + bias).view(64, 8, 32)
    groups = choice.topk(2, dim=-1).values.sum(-1).topk(4, dim=-1).indices
    kept = torch.zeros(64, 8, device=device).scatter(1, groups, 1.0).bool()
    ids = choice.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(8, dim=-1).indices
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) * 2.5
    got = router_ref(logits, bias, rule, count(64, device))
    assert torch.equal(got.topk_ids, ids)
    torch.testing.assert_close(got.topk_weights, weights)


@pytest.mark.parametrize(("norm", "factor"), [(True, 1.0), (True, 2.5), (False, 1.0), (False, 2.5)])
def test_norm_and_factor_are_applied_once_each(norm, factor, device):
    experts, rule = rule_of("flat", "softmax", norm_topk_prob=norm, routed_scaling_factor=factor)
    logits = torch.randn(9, experts, device=device)
    got = router_ref(logits, None, rule, count(9, device)).topk_weights
    want = logits.softmax(1).topk(8, dim=1).values
    want = want / want.sum(1, keepdim=True) if norm else want
    torch.testing.assert_close(got, want * factor)


def test_softmax_after_topk_sums_to_one(device):
    experts, rule = rule_of("flat", "softmax_after_topk")
    logits = torch.randn(9, experts, device=device)
    got = router_ref(logits, None, rule, count(9, device))
    torch.testing.assert_close(got.topk_weights, logits.topk(8, dim=1).values.softmax(1))


@both
def test_zero_tokens(exact, device):
    experts, rule = rule_of("tiny")
    got = assert_equal(torch.zeros(0, experts, device=device), None, rule, count(0, device), exact)
    assert got.topk_ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 9}, "top_k is 9; accepted: 1 to 8"),
        ({"top_k": 3, "n_group": 4, "topk_group": 1}, "top_k is 3; accepted: 1 to 2"),
        ({"top_k": 1, "n_group": 3}, "n_group is 3; accepted: a divisor of 8"),
        ({"top_k": 1, "n_group": 2, "topk_group": 3}, "topk_group is 3; accepted: 1 to n_group"),
        ({"top_k": 1, "scoring": "relu"}, "scoring is relu; accepted: softmax, sigmoid"),
    ],
)
def test_what_cannot_be_routed_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        router(torch.zeros(2, 8), None, RouterRule(**fields), torch.ones(1, dtype=torch.int32))
