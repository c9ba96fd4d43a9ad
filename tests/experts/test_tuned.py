"""TunedExperts builds the backends its plan names and gives each load to the right one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from epdecode import experts
from epdecode.batch import MaskedBatch, no_mark
from epdecode.errors import EnvironmentFault
from epdecode.experts import tuned, tuned_table
from epdecode.experts.tuned import TunedExperts
from epdecode.plan.expert_choice import Choice
from epdecode.plan.expert_loads import Load
from tests.small import small_plan

CPU = torch.device("cpu")


class Spy:
    """A backend that says its name."""

    def __init__(self, name):
        self.name = name

    def prepare(self, weights):
        return (self.name, weights)

    def __call__(self, batch, weights, mark):
        assert weights == (self.name, "weights")
        return self.name


def plan(*backends):
    """Loads of 1, 2, 4... rows, one for each name."""
    made = small_plan(1, "experts.name=tuned")
    loads = tuple(
        Load(
            bucket=1 << i,
            rows=1 << i,
            fuller_rows=1 << i,
            choice=Choice(backend=name),
            source="rule",
        )
        for i, name in enumerate(backends)
    )
    return replace(made, experts=replace(made.experts, loads=loads, shared_loads=()))


@pytest.fixture
def built(monkeypatch):
    """Names of the backends built, in place of which spies stand."""
    names = []

    def load(seam, members, name):
        names.append(name)
        return lambda plan, device: Spy(name)

    monkeypatch.setattr(tuned, "load_member", load)
    return names


def run(member, rows):
    batch = MaskedBatch(torch.empty(0), torch.empty(0), rows)
    return member(batch, member.prepare("weights"), no_mark)


def test_each_load_goes_where_the_plan_says(built):
    member = TunedExperts(plan("triton_gemm", "triton_gemm", "deepgemm"), CPU)
    said = [run(member, rows) for rows in (1, 2, 3, 4, 500)]
    assert said == ["triton_gemm"] * 2 + ["deepgemm"] * 3


@pytest.mark.parametrize("name", ["triton_gemm", "deepgemm"])
def test_a_backend_no_load_wants_is_not_built(built, name):
    assert run(TunedExperts(plan(name, name), CPU), 1) == name
    assert built == [name]


def test_a_library_that_some_load_needs_is_loaded_with_the_plan(monkeypatch):
    def load(seam, members, name):
        if name == "deepgemm":
            raise EnvironmentFault("no deep_gemm here")
        return name

    monkeypatch.setattr(experts, "load_member", load)
    assert experts.load_experts(plan("triton_gemm")) == "tuned"
    with pytest.raises(EnvironmentFault, match="no deep_gemm here"):
        experts.load_experts(plan("triton_gemm", "deepgemm"))
    shared = plan("triton_gemm")
    wanted = replace(shared.experts, shared_loads=plan("deepgemm").experts.loads)
    with pytest.raises(EnvironmentFault, match="no deep_gemm here"):
        experts.load_experts(replace(shared, experts=wanted))


@pytest.mark.parametrize("there", [True, False])
def test_what_this_machine_has(monkeypatch, there):
    monkeypatch.setattr(
        tuned_table,
        "sys",
        SimpleNamespace(modules={"deep_gemm": None} if there else {}),
    )
    monkeypatch.setattr(tuned_table.importlib.util, "find_spec", lambda name: None)
    kernels = tuned_table.kernels_here(CPU)
    assert (kernels.deepgemm, kernels.table) == (there, {})
