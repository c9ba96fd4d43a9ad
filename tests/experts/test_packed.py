"""Packed experts: the plain expert's numbers on valid rows, whatever the load and the tail.

Every row in a gap or in the tail is NaN, in data and scales: it must reach no result.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch

from epdecode.batch import Fp8Rows, PackedBatch, no_mark
from epdecode.errors import ConfigError, EnvironmentFault
from epdecode.experts import Experts, build_experts
from epdecode.experts.blocks import block_ends
from epdecode.experts.reference import as_fp8_input, expert_mlp, plain_weights, select
from epdecode.kernels.fp8 import mn_major_scales, quantize_ref
from epdecode.kernels.group_quant import group_quant_ref
from epdecode.kernels.swiglu_quant import swiglu_quant_packed_ref
from epdecode.plan import Plan
from epdecode.verify import row_errors, tolerance
from epdecode.weights.seeded import SeededWeights
from tests.conftest import GPU
from tests.experts.test_contract import LOADS, four_experts
from tests.fakes import deep_gemm as fake_deep_gemm
from tests.small import small_plan

SWITCHES = [
    [],
    ["experts.fused_activation=false"],
    ["experts.fused_quant_layout=false"],
    ["transport.wire=bf16"],
    ["transport.wire=bf16", "experts.fused_activation=false"],
    ["experts.row_alignment=64"],
]


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU deep_gemm's double, and plain torch for kernels that have tests of their own
    (Triton's interpreter rounds some values to the wrong neighbour)."""
    if GPU:
        return
    monkeypatch.setitem(sys.modules, "deep_gemm", fake_deep_gemm.module())
    monkeypatch.delitem(sys.modules, "epdecode.experts.deepgemm_packed", raising=False)
    member = importlib.import_module("epdecode.experts.deepgemm_packed")
    monkeypatch.setattr(member, "swiglu_quant_packed", swiglu_quant_packed_ref)
    monkeypatch.setattr(member, "group_quant", group_quant_ref)


def plan_of(member: str, *overrides: str) -> Plan:
    chosen = [f"experts.name={member}", "transport.layout=packed"]
    return small_plan(1, *chosen, *overrides, model=four_experts())


def make_batch(
    plan: Plan, counts: list[int], device: torch.device
) -> tuple[PackedBatch, list[torch.Tensor]]:
    """A batch and the plain rows of each expert."""
    rows, hidden = plan.transport.packed_rows, plan.model.hidden
    packed = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16, device=device)
    labels = torch.full((rows,), -1, dtype=torch.int32, device=device)
    data = torch.full((rows, hidden), torch.nan, device=device).to(torch.float8_e4m3fn)
    scales = mn_major_scales(1, rows, hidden // 128, "fp32", device)[0].fill_(torch.nan)
    numbers = torch.tensor(counts, dtype=torch.int32, device=device)
    plain = []
    ends = block_ends(numbers, plan.transport.row_alignment).tolist()
    for expert, (count, end) in enumerate(zip(counts, ends, strict=True)):
        here = slice(end - count, end)
        made = torch.randn(count, hidden, device=device).to(torch.bfloat16)
        quantised = quantize_ref(made)
        packed[here], labels[here] = made, expert
        data[here], scales[here] = quantised.data, quantised.scales
        plain.append(made)
    sent = packed if plan.transport.wire == "bf16" else Fp8Rows(data, scales)
    return PackedBatch(sent, labels, numbers, 8), plain


def check(plan: Plan, counts: list[int], device: torch.device) -> None:
    source = SeededWeights(plan.model, plan.plain_expert_size, 0, device)
    weights = source.layer(0, range(4)).experts
    experts = build_experts(plan, device)
    prepared = experts.prepare(weights)
    for load in (counts, counts[::-1]):
        batch, plain = make_batch(plan, load, device)
        out = experts(batch, prepared, no_mark)
        assert out.shape == (plan.transport.packed_rows, plan.model.hidden)
        ends = block_ends(batch.counts, plan.transport.row_alignment).tolist()
        for expert, (rows, end) in enumerate(zip(plain, ends, strict=True)):
            expected = expert_mlp(
                as_fp8_input(rows.float(), "fp32"),
                plain_weights(select(weights.gate_up, expert)),
                plain_weights(select(weights.down, expert)),
                "fp32",
            )
            errors = row_errors(out[end - rows.shape[0] : end], expected)
            assert (errors <= tolerance(plan)).all(), (expert, errors)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_the_plain_loop(wire: str, load: list[int]) -> None:
    check(plan_of("torch_loop", f"transport.wire={wire}"), load, torch.device("cpu"))


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_deepgemm_on_its_double(load: list[int]) -> None:
    check(plan_of("deepgemm"), load, torch.device("cpu"))


@pytest.mark.parametrize("switches", SWITCHES[1:], ids=" ".join)
def test_each_form_of_deepgemm_on_its_double(switches: list[str]) -> None:
    check(plan_of("deepgemm", *switches), LOADS["odd"], torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("switches", SWITCHES, ids=" ".join)
def test_each_form_of_deepgemm_on_the_gpu(
    switches: list[str], load: list[int], device: torch.device
) -> None:
    check(plan_of("deepgemm", *switches), load, device)


def workspaces(experts: Experts) -> set[int]:
    """Storages that the member's buffers live in."""
    parts: list[torch.Tensor] = [experts._gate_up, experts._out]
    parts += [experts._act.data, experts._act.scales]
    return {part.untyped_storage().data_ptr() for part in parts}


@pytest.mark.parametrize("switches", SWITCHES, ids=" ".join)
def test_two_workspaces_of_the_planned_size_hold_everything(switches: list[str]) -> None:
    plan = plan_of("deepgemm", *switches)
    experts = build_experts(plan, torch.device("cpu"))
    assert len(workspaces(experts)) == 2
    sizes = {part.untyped_storage().nbytes() for part in (experts._gate_up, experts._out)}
    sizes.add(experts._act.data.untyped_storage().nbytes())
    assert sizes == set(plan.experts.workspace_bytes)


def test_the_library_is_told_the_plans_alignment() -> None:
    build_experts(plan_of("deepgemm", "experts.row_alignment=64"), torch.device("cpu"))
    assert fake_deep_gemm.get_m_alignment_for_contiguous_layout() == 64


def test_a_library_that_cannot_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake_deep_gemm, "set_mk_alignment_for_contiguous_layout")
    with pytest.raises(EnvironmentFault, match="the plan has 64 rows, this DeepGEMM asks for 128"):
        build_experts(plan_of("deepgemm", "experts.row_alignment=64"), torch.device("cpu"))


def test_bfloat16_weights_are_refused() -> None:
    plan = plan_of("deepgemm")
    bf16 = replace(plan, model=replace(plan.model, weight_format="bf16"))
    with pytest.raises(ConfigError, match="deepgemm takes FP8 weights, tiny has bf16"):
        build_experts(bf16, torch.device("cpu"))


def test_block_ends() -> None:
    counts = torch.tensor([3, 0, 128, 1], dtype=torch.int32)
    assert block_ends(counts, 128).tolist() == [3, 128, 256, 257]
    assert block_ends(torch.zeros(4, dtype=torch.int32), 128).tolist() == [0, 0, 0, 0]
