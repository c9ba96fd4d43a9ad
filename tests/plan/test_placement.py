"""Placement: nothing is lost, nobody holds an expert twice, and loads get even."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdecode.errors import ConfigError
from epdecode.plan import make_plan
from epdecode.plan.placement import (
    balanced,
    contiguous,
    first_slots,
    imbalance,
    node_problem,
    num_replicas,
    rank_loads,
    redundant_problem,
    replica_table,
)
from tests.small import small_config, small_model


def skewed(num_experts: int, sigma: float = 1.0) -> list[float]:
    rng = random.Random(num_experts)
    return [math.exp(rng.gauss(0, sigma)) for _ in range(num_experts)]


def ranks_of(slots: tuple[int, ...], num_ranks: int) -> list[tuple[int, ...]]:
    size = len(slots) // num_ranks
    return [slots[rank * size : (rank + 1) * size] for rank in range(num_ranks)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[float], int, int]:
    num_ranks = draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, 12))
    legal = [
        count
        for count in range(num_experts * (num_ranks - 1) + 1)
        if (num_experts + count) % num_ranks == 0
    ]
    values = st.one_of(st.just(0.0), st.just(5.0), st.floats(0, 100))
    load = draw(st.lists(values, min_size=num_experts, max_size=num_experts))
    return load, draw(st.sampled_from(legal)), num_ranks


@given(jobs())
@settings(max_examples=300, deadline=None)
def test_every_expert_is_somewhere_and_on_no_rank_twice(job: tuple[list[float], int, int]) -> None:
    load, redundant, num_ranks = job
    slots = balanced(load, redundant, num_ranks)
    assert len(slots) == len(load) + redundant
    assert set(slots) == set(range(len(load)))
    for held in ranks_of(slots, num_ranks):
        assert len(set(held)) == len(held) == len(slots) // num_ranks
    assert sum(rank_loads(slots, load, num_ranks)) == pytest.approx(sum(load))


@pytest.mark.parametrize(("redundant", "at_most"), [(0, 1.05), (32, 1.01)])
def test_256_skewed_experts_on_8_ranks_get_even(redundant: int, at_most: float) -> None:
    load = skewed(256)
    before = imbalance(rank_loads(contiguous(256), load, 8))
    after = imbalance(rank_loads(balanced(load, redundant, 8), load, 8))
    assert before > 1.2
    assert after < at_most


def test_the_busiest_expert_is_replicated_first() -> None:
    load = [8.0, 1.0, 1.0, 2.0]
    assert num_replicas(balanced(load, 4, 4), 4) == [4, 1, 1, 2]


def test_one_expert_that_gets_everything_is_spread_over_all_ranks() -> None:
    load = [100.0] + [0.0] * 7
    slots = balanced(load, 8, 8)
    assert num_replicas(slots, 8)[0] == 8
    assert imbalance(rank_loads(slots, load, 8)) == pytest.approx(1.0)


def test_groups_stay_on_a_node() -> None:
    """8 groups of 8 experts on 4 nodes of 2 ranks: two groups a node, replicas with them."""
    load = skewed(64)
    slots = balanced(load, 16, 8, num_nodes=4, num_groups=8)
    groups_of_node = []
    for node in range(4):
        held = [expert for rank in ranks_of(slots, 8)[2 * node : 2 * node + 2] for expert in rank]
        groups_of_node.append({expert // 8 for expert in held})
    assert [len(groups) for groups in groups_of_node] == [2, 2, 2, 2]
    assert set().union(*groups_of_node) == set(range(8))
    assert set(slots) == set(range(64))


@pytest.mark.parametrize(
    ("groups", "redundant", "ranks", "nodes", "problem"),
    [
        (1, 8, 4, 2, "1 groups of the router do not divide over 2 nodes"),
        (8, 3, 4, 2, "3 redundant experts do not divide over 2 nodes"),
        (8, 8, 3, 2, "3 ranks do not divide over 2 nodes"),
        (8, 8, 4, 2, None),
    ],
)
def test_what_does_not_divide_over_the_nodes(
    groups: int, redundant: int, ranks: int, nodes: int, problem: str | None
) -> None:
    assert node_problem(groups, redundant, ranks, nodes) == problem


def test_the_plan_places_by_node_where_it_is_asked_to() -> None:
    config = ["experts.placement=balanced_by_node", "experts.redundant=4", "routing.kind=zipf"]
    plan = make_plan(small_config(*config), small_model(), 4, ranks_per_node=2)
    for slots in plan.placement.slots:
        nodes = [{expert // 2 for expert in slots[node * 6 : node * 6 + 6]} for node in range(2)]
        assert [len(groups) for groups in nodes] == [2, 2]
        assert not nodes[0] & nodes[1]


@pytest.mark.parametrize(
    ("ranks_per_node", "redundant", "message"),
    [
        (2, 6, r"experts.redundant \(of one node\): 4 experts \+ 3 replicas on 2 rank"),
        (2, 3, "3 redundant experts do not divide over 2 nodes; accepted here: balanced"),
    ],
)
def test_a_placement_by_node_that_cannot_be_is_refused(
    ranks_per_node: int, redundant: int, message: str
) -> None:
    config = ["experts.placement=balanced_by_node", f"experts.redundant={redundant}"]
    with pytest.raises(ConfigError, match=message):
        make_plan(small_config(*config), small_model(), 4, ranks_per_node=ranks_per_node)


def test_replicas_are_taken_by_turns_and_minus_one_stays() -> None:
    slots = (0, 1, 0, 2)
    table = replica_table(slots, 3, 3, rank=0)
    assert [row[0] for row in table] == [0, 2, 0]
    assert [row[1] for row in table] == [1, 1, 1]
    assert [row[-1] for row in table] == [-1, -1, -1]
    assert [row[0] for row in replica_table(slots, 3, 3, rank=1)] == [2, 0, 2]


def test_first_slots_hold_every_expert_once() -> None:
    assert first_slots((3, 1, 3, 0, 2, 1)) == {0, 1, 3, 4}


@pytest.mark.parametrize(
    ("experts", "redundant", "ranks", "near"),
    [(256, 30, 8, "24, 32"), (8, 9, 2, "6, 8"), (256, 1, 1, "0"), (30, 0, 8, "2, 10")],
)
def test_numbers_that_do_not_work_come_with_the_nearest_that_do(
    experts: int, redundant: int, ranks: int, near: str
) -> None:
    problem = redundant_problem(experts, redundant, ranks)
    assert problem is not None
    assert problem.endswith(f"nearest: {near}")


def test_numbers_that_work() -> None:
    assert redundant_problem(256, 32, 8) is None
    assert redundant_problem(30, 2, 8) is None
    assert redundant_problem(8, 0, 1) is None


def test_imbalance_of_nothing_is_even() -> None:
    assert imbalance([0.0, 0.0]) == 1.0
    assert imbalance([3.0, 1.0]) == 1.5
