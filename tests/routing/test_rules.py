"""Forced routes: in range, distinct, as skewed as asked, the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epdecode.config import RoutingConfig
from epdecode.models.layers import LoopLayer
from epdecode.routing.load import inclusion, likelihood, weights_for
from epdecode.routing.rules import RULES, RoutingJob

EXPERTS, TOP_K, TOKENS = 32, 4, 4000
LAYER = LoopLayer(0, 0)


def job(kind: str, tokens: int = TOKENS, **change: object) -> RoutingJob:
    weights = None
    if kind in ("zipf", "lognormal", "load_table"):
        routing = RoutingConfig(kind="lognormal" if kind == "load_table" else kind, sigma=1.5)
        weights = torch.from_numpy(likelihood(routing, EXPERTS, LAYER))
    recorded = None
    if kind == "trace":
        recorded = (torch.arange(tokens)[:, None] + torch.arange(TOP_K)) % EXPERTS
    fields: dict[str, object] = {
        "tokens": tokens, "top_k": TOP_K, "num_experts": EXPERTS, "world_size": 4, "rank": 1,
        "layer": 0, "step": 0, "seed": 0, "share": 0.5, "weights": weights, "recorded": recorded,
        **change,
    }  # fmt: skip
    return RoutingJob(**fields)


def share_of(ids: torch.Tensor) -> torch.Tensor:
    """Part of the tokens that chose each expert."""
    return torch.bincount(ids[ids >= 0], minlength=EXPERTS) / ids.shape[0]


@pytest.mark.parametrize("kind", sorted(RULES))
@pytest.mark.parametrize("tokens", [0, 1, 200])
def test_ids_are_distinct_in_range_and_the_same_everywhere(kind: str, tokens: int) -> None:
    ids = RULES[kind](job(kind, tokens))
    assert ids.shape == (tokens, TOP_K)
    assert ids.dtype == torch.int64
    assert ((ids >= -1) & (ids < EXPERTS)).all()
    assert all(len(set(row)) == TOP_K for row in ids.tolist())
    assert torch.equal(ids, RULES[kind](job(kind, tokens)))


@pytest.mark.parametrize("kind", ["uniform", "zipf", "lognormal", "hot_rank", "hot_expert"])
def test_ranks_steps_layers_and_seeds_draw_differently(kind: str) -> None:
    first = RULES[kind](job(kind, 50))
    for change in ({"rank": 0}, {"step": 1}, {"layer": 1}, {"seed": 1}):
        assert not torch.equal(first, RULES[kind](job(kind, 50, **change)))


@pytest.mark.parametrize("kind", ["zipf", "lognormal"])
def test_drawn_routes_have_the_load_that_placement_expects(kind: str) -> None:
    made = job(kind)
    assert made.weights is not None
    expected = inclusion(made.weights.numpy(), TOP_K)
    assert expected.sum() == pytest.approx(TOP_K)
    torch.testing.assert_close(
        share_of(RULES[kind](made)).double(), torch.from_numpy(expected), rtol=0.1, atol=0.02
    )


def test_zipf_falls_with_the_rank_to_the_power_of_alpha() -> None:
    weights = likelihood(RoutingConfig(kind="zipf", alpha=2.0), EXPERTS, LAYER)
    ordered = np.sort(weights)[::-1]
    assert ordered[0] / ordered[1] == pytest.approx(4)
    assert ordered[0] / ordered[9] == pytest.approx(100)


def test_sigma_is_the_spread_of_the_logarithm() -> None:
    weights = likelihood(RoutingConfig(kind="lognormal", sigma=2.0), 4096, LAYER)
    assert np.log(weights).std() == pytest.approx(2.0, rel=0.05)


def test_which_expert_is_hot_depends_on_layer_and_seed() -> None:
    hot = {
        int(likelihood(RoutingConfig(kind="zipf", seed=seed), 256, LoopLayer(0, layer)).argmax())
        for seed in range(2)
        for layer in range(2)
    }
    assert len(hot) == 4


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_hot_rank_gets_its_share_of_all_choices(share: float) -> None:
    ids = RULES["hot_rank"](job("hot_rank", share=share))
    assert (ids < EXPERTS // 4).float().mean().item() == pytest.approx(share, abs=0.02)


def test_hot_rank_with_fewer_experts_than_choices_takes_them_all() -> None:
    ids = RULES["hot_rank"](job("hot_rank", 100, share=1.0, world_size=16))
    assert (ids < 2).sum(1).tolist() == [2] * 100


def test_hot_rank_without_others_has_nowhere_else_to_go() -> None:
    ids = RULES["hot_rank"](job("hot_rank", 100, share=0.0, world_size=1))
    assert (ids >= 0).all()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_hot_expert_is_chosen_by_its_share_of_the_tokens(share: float) -> None:
    ids = RULES["hot_expert"](job("hot_expert", share=share))
    assert (ids == 0).any(1).float().mean().item() == pytest.approx(share, abs=0.03)


def test_counts_come_back_when_drawn_by_their_weights() -> None:
    """Recorded loads are shares of top-k draws, which are flatter than the weights behind them."""
    counts = np.random.default_rng(0).lognormal(0, 1.5, EXPERTS)
    counts[:3] = 0
    made = job("load_table", weights=torch.from_numpy(weights_for(counts, TOP_K, "x")))
    share = np.minimum(counts / counts.sum() * TOP_K, 1)
    drawn = share_of(RULES["load_table"](made))
    assert (drawn[:3] == 0).all()
    torch.testing.assert_close(drawn.double(), torch.from_numpy(share), rtol=0.15, atol=0.03)
