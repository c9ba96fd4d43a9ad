"""The table of limits, with the figures and rules that people met in public."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epdecode.plan.limits import LIMITS, Request, low_latency_bytes, qp_depth_needed, violations

GOOD = Request(
    transport="deepep_ll",
    wire="fp8",
    hidden=7168,
    expert_size=2048,
    top_k=8,
    num_experts=256,
    ep=8,
    max_tokens=128,
)


@pytest.mark.parametrize(
    ("max_tokens", "hidden", "experts", "size"),
    [(128, 3072, 288, 920127872), (128, 7168, 256, 1908410496), (128, 7168, 288, 2146961792)],
)
def test_low_latency_bytes_are_the_librarys(
    max_tokens: int, hidden: int, experts: int, size: int
) -> None:
    assert low_latency_bytes(max_tokens, hidden, experts) == size
    assert size % 128 == 0


@pytest.mark.parametrize(("tokens", "depth"), [(4, 128), (511, 1024), (512, 1026)])
def test_qp_depth(tokens: int, depth: int) -> None:
    assert qp_depth_needed(tokens) == depth


def test_a_good_request_breaks_nothing() -> None:
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": 2880, "wire": "bf16"}, "nearest 3072"),
        ({"hidden": 3584}, "nearest 3072"),
        ({"num_experts": 30, "top_k": 2}, "30 experts do not divide over 8 ranks"),
        ({"num_experts": 96, "ep": 12}, "12 ranks; accepted: fewer than 8, or a multiple of 8"),
        ({"top_k": 16}, "top-k 16; accepted: at most 11"),
        (
            {"ep": 2, "num_experts": 8, "top_k": 2, "max_tokens": 1},
            "nearest max_tokens_per_rank: 2",
        ),
        ({"max_tokens": 2048}, "at most 1024"),
        ({"max_tokens": 512, "qp_depth_set": 256}, "needs at least 1026"),
        ({"max_tokens": 1024, "num_experts": 1024, "ep": 64}, "at most 32 GiB"),
        ({"num_experts": 2048, "ep": 64}, "warp groups"),
        ({"top_k": 9, "num_experts": 8}, "accepted: 1 to 8"),
    ],
)
def test_each_broken_rule_is_named_with_the_nearest_legal_value(
    change: dict[str, object], said: str
) -> None:
    broken = violations(replace(GOOD, **change))
    assert any(said in line for line in broken), broken
    assert all("[deepep_ll; " in line for line in broken), "every rule gives its source"


def test_the_smallest_good_tuple_passes() -> None:
    small = replace(GOOD, ep=2, num_experts=8, top_k=2, max_tokens=2)
    assert violations(small) == []
    assert violations(replace(GOOD, max_tokens=511, qp_depth_set=1024)) == []


@pytest.mark.parametrize("hidden", [2880, 3584, 7168])
def test_the_plain_transport_takes_any_hidden_in_bf16(hidden: int) -> None:
    assert violations(replace(GOOD, transport="torch_a2a", hidden=hidden, wire="bf16")) == []


def test_half_a_group_is_refused_in_fp8() -> None:
    (line,) = violations(replace(GOOD, transport="torch_a2a", hidden=2880))
    assert "22.5 groups of 128" in line
    assert "transport.wire=bf16" in line


def test_every_limit_has_a_source() -> None:
    assert all(limit.source and limit.transports for limit in LIMITS)
