"""Routes from outside, and the gate's."""

from __future__ import annotations

import pytest
import torch

from epdecode.errors import UserError
from epdecode.router import PLAIN, GateRouter, make_route, rule_of
from epdecode.routing.rules import RULES, RoutingJob, forced_weights
from tests.small import small_model


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_ids_and_weights_are_converted_by_value(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 5], [-1, 7]], dtype=dtype)
    weights = torch.tensor([[0.5, 0.25], [torch.nan, 1.0]], dtype=torch.bfloat16)
    route = make_route(ids, weights, 8)
    assert route.topk_ids.dtype == torch.int64
    assert route.topk_ids.tolist() == [[0, 5], [-1, 7]]
    assert route.topk_weights.dtype == torch.float32
    assert route.topk_weights[0].tolist() == [0.5, 0.25]


def test_strided_ids_give_the_same_route() -> None:
    wide = torch.arange(12).view(2, 6) % 8
    route = make_route(wide[:, ::3], torch.ones(2, 6)[:, ::3], 8)
    assert route.topk_ids.is_contiguous()
    assert route.topk_ids.tolist() == [[0, 3], [6, 1]]


@pytest.mark.parametrize("bad", [8, -2, 1000])
def test_an_id_out_of_range_is_named_by_token_and_slot(bad: int) -> None:
    ids = torch.tensor([[0, 1], [2, bad]])
    with pytest.raises(UserError, match=rf"token 1, slot 1 is {bad}; accepted: -1 to 7"):
        make_route(ids, torch.ones(2, 2), 8)


def test_float_ids_integer_weights_and_unlike_shapes_are_refused() -> None:
    with pytest.raises(UserError, match="topk_ids: got torch.float32"):
        make_route(torch.zeros(1, 2), torch.ones(1, 2), 8)
    with pytest.raises(UserError, match="topk_weights: got torch.int64"):
        make_route(torch.zeros(1, 2).long(), torch.ones(1, 2).long(), 8)
    with pytest.raises(UserError, match=r"\(1, 2\) and topk_weights \(1, 3\)"):
        make_route(torch.zeros(1, 2).long(), torch.ones(1, 3), 8)


def test_no_tokens_is_a_route() -> None:
    assert make_route(torch.zeros(0, 2).long(), torch.zeros(0, 2), 8).topk_ids.shape == (0, 2)


def test_the_gate_gives_padded_rows_no_expert() -> None:
    model = small_model()
    gate = torch.randn(model.num_experts, model.hidden).to(torch.bfloat16)
    router = GateRouter(gate, torch.zeros(model.num_experts), rule_of(model), PLAIN)
    normed = torch.randn(4, model.hidden).to(torch.bfloat16)
    normed[3] = torch.nan
    route = router(normed, torch.tensor([3], dtype=torch.int32))
    assert (route.topk_ids[3] == -1).all()
    assert (route.topk_ids[:3] >= 0).all()
    assert route.topk_weights[:3].sum(1).tolist() == pytest.approx([2.5] * 3)


def job(tokens: int = 24, **change: int) -> RoutingJob:
    fields = {
        "tokens": tokens,
        "top_k": 2,
        "num_experts": 8,
        "world_size": 2,
        "rank": 1,
        "layer": 3,
        "step": 5,
        "seed": 0,
    }
    return RoutingJob(**{**fields, **change})


@pytest.mark.parametrize("kind", sorted({"uniform", "balanced", "stress"} & set(RULES)))
def test_forced_ids_are_distinct_and_in_range(kind: str) -> None:
    ids = RULES[kind](job())
    assert ids.shape == (24, 2)
    assert ids.dtype == torch.int64
    assert all(len(set(row)) == 2 for row in ids.tolist())
    assert ((ids >= -1) & (ids < 8)).all()
    assert torch.equal(ids, RULES[kind](job())), "the same on every machine"


def test_balanced_gives_every_expert_the_same() -> None:
    counts = torch.bincount(RULES["balanced"](job()).flatten(), minlength=8)
    assert counts.tolist() == [6] * 8


def test_stress_sends_everything_to_rank_0() -> None:
    ids = RULES["stress"](job())
    assert set(ids.flatten().tolist()) == {0, 1}
    narrow = RULES["stress"](job(num_experts=2))
    assert set(narrow.flatten().tolist()) == {0, -1}, "rank 0 has one expert, a token two slots"


def test_uniform_differs_by_step_layer_and_rank() -> None:
    first = RULES["uniform"](job())
    assert not torch.equal(first, RULES["uniform"](job(step=6)))
    assert not torch.equal(first, RULES["uniform"](job(layer=4)))
    assert not torch.equal(first, RULES["uniform"](job(rank=0)))


def test_forced_weights_share_the_factor_over_the_chosen() -> None:
    weights = forced_weights(torch.tensor([[0, 1], [2, -1], [-1, -1]]), 2.5)
    assert weights[0].tolist() == [1.25, 1.25]
    assert weights[1, 0] == 2.5
    assert torch.isfinite(weights).all()
