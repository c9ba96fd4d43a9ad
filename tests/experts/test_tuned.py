"""TunedExperts gives each load to the backend its table names, and says when one is missing."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from epdecode.batch import MaskedBatch, no_mark
from epdecode.errors import EnvironmentFault
from epdecode.experts import tuned
from epdecode.experts.tuned import TunedExperts, most_rows
from epdecode.plan.expert_choice import Choice
from tests.small import plain_router, small_model, small_plan

CPU = torch.device("cpu")
KEY = "E4-H256-I256"
TABLE = {KEY: {rows: Choice() for rows in (1, 4, 8)} | {16: Choice(backend="deepgemm")}}


class Spy:
    """A backend that says its name."""

    def __init__(self, name):
        self.name, self.prepared = name, []

    def prepare(self, weights):
        self.prepared.append(weights)
        return (self.name, weights)

    def __call__(self, batch, weights, mark):
        assert weights == (self.name, "weights")
        return self.name


def plan(tokens=16, rows=128):
    model = small_model(num_experts=4, top_k=2, num_shared_experts=0, router=plain_router())
    overrides = [
        "experts.name=triton_gemm",
        f"batch.buckets=[{tokens}]",
        f"batch.tokens_per_rank={tokens}",
        f"transport.max_tokens_per_rank={rows}",
    ]
    return small_plan(1, *overrides, model=model)


@pytest.fixture
def backends(monkeypatch):
    """Both backends replaced by spies; ``fault`` keeps the rival from loading."""
    state = SimpleNamespace(fault=None, built=[])

    def load(seam, members, name):
        if state.fault:
            raise state.fault
        state.built.append(name)
        return lambda plan, device: Spy(name)

    monkeypatch.setattr(tuned, "TritonGemm", lambda plan, device, table: Spy("triton_gemm"))
    monkeypatch.setattr(tuned, "load_member", load)
    return state


def run(member, rows):
    batch = MaskedBatch(torch.empty(0), torch.empty(0), rows)
    return member(batch, member.prepare("weights"), no_mark)


def test_each_load_goes_where_the_table_says(backends):
    member = TunedExperts(plan(32), CPU, TABLE)
    assert [run(member, rows) for rows in (1, 8, 9, 16)] == [
        "triton_gemm",
        "triton_gemm",
        "deepgemm",
        "deepgemm",
    ]


def test_deepgemm_is_not_built_when_no_load_wants_it(backends):
    member = TunedExperts(plan(16), CPU, TABLE)
    assert most_rows(plan(16)) == 8
    assert run(member, 16) == "triton_gemm"
    assert backends.built == []


@pytest.mark.parametrize("case", ["not installed", "odd capacity"])
def test_a_missing_rival_is_said_and_lived_without(backends, caplog, case):
    caplog.set_level(logging.INFO)
    if case == "not installed":
        backends.fault = EnvironmentFault("no deep_gemm here")
    member = TunedExperts(plan(32, 96 if case == "odd capacity" else 128), CPU, TABLE)
    assert run(member, 16) == "triton_gemm"
    expected = "no deep_gemm here" if case == "not installed" else "128-row tiles"
    assert expected in caplog.text
