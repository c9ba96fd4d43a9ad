"""What every experts member promises: the plain expert's numbers on valid rows, whatever the load.

Everything past a count is NaN, in data and scales: it must reach no result.
"""

from __future__ import annotations

import pytest
import torch

from epdecode.batch import Fp8Rows, MaskedBatch, no_mark
from epdecode.experts import build_experts
from epdecode.experts.reference import as_fp8_input, expert_mlp, plain_weights, select
from epdecode.kernels.fp8 import mn_major_scales, quantize_ref
from epdecode.models import ModelShape
from epdecode.plan import Plan, make_plan
from epdecode.verify import row_errors, tolerance
from epdecode.weights.seeded import SeededWeights
from tests.small import plain_router, small_config, small_model

CPU_MEMBERS = ["torch_loop"]
GPU_MEMBERS = ["torch_loop", "deepgemm", "triton_gemm", "tuned"]
LOADS = {
    "even": [5, 5, 5, 5],
    "with empty experts": [0, 16, 0, 3],
    "one expert": [0, 0, 16, 0],
    "nothing": [0, 0, 0, 0],
    "odd": [1, 7, 16, 13],
}


def four_experts() -> ModelShape:
    return small_model(
        hidden=512, expert_size=256, num_experts=4, num_shared_experts=0, router=plain_router()
    )


def plan_of(member: str, wire: str) -> Plan:
    model = four_experts()
    return make_plan(small_config(*overrides(member, f"transport.wire={wire}")), model, 1)


def overrides(member: str, *more: str) -> list[str]:
    """A capacity the member takes: 16 rows, or DeepGEMM's tile."""
    rows = 128 if member in ("deepgemm", "tuned") else 16
    return [f"experts.name={member}", f"transport.max_tokens_per_rank={rows}", *more]


def make_rows(plan: Plan, counts: list[int], device: torch.device) -> tuple[object, torch.Tensor]:
    shape = (plan.num_local_experts, plan.capacity, plan.model.hidden)
    rows = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    for expert, count in enumerate(counts):
        rows[expert, :count] = torch.randn(count, shape[2], device=device).to(torch.bfloat16)
    if plan.transport.wire == "bf16":
        return rows, rows
    scales = mn_major_scales(*shape[:2], shape[2] // 128, "fp32", device)
    scales.fill_(torch.nan)
    data = torch.full(shape, torch.nan, device=device).to(torch.float8_e4m3fn)
    for expert, count in enumerate(counts):
        made = quantize_ref(rows[expert, :count])
        data[expert, :count] = made.data
        scales[expert, :count] = made.scales
    return Fp8Rows(data, scales), rows


def check(member: str, wire: str, counts: list[int], device: torch.device) -> None:
    plan = plan_of(member, wire)
    weights = (
        SeededWeights(plan.model, plan.plain_expert_size, 0, device).layer(0, range(4)).experts
    )
    experts = build_experts(plan, device)
    rows, plain_rows = make_rows(plan, counts, device)
    batch = MaskedBatch(rows, torch.tensor(counts, dtype=torch.int32, device=device), 8)
    out = experts(batch, experts.prepare(weights), no_mark)
    assert out.shape == (4, plan.capacity, plan.model.hidden)
    for expert, count in enumerate(counts):
        expected = expert_mlp(
            as_fp8_input(plain_rows[expert, :count].float(), "fp32"),
            plain_weights(select(weights.gate_up, expert)),
            plain_weights(select(weights.down, expert)),
            "fp32",
        )
        errors = row_errors(out[expert, :count], expected)
        assert (errors <= tolerance(plan)).all(), (expert, errors)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
@pytest.mark.parametrize("member", CPU_MEMBERS)
def test_valid_rows_are_right(member: str, wire: str, load: list[int]) -> None:
    check(member, wire, load, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
@pytest.mark.parametrize("member", GPU_MEMBERS)
def test_valid_rows_are_right_on_the_gpu(
    member: str, wire: str, load: list[int], device: torch.device
) -> None:
    check(member, wire, load, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "switch", ["experts.fused_activation=false", "experts.fused_quant_layout=false"]
)
def test_the_plain_forms_of_deepgemms_activation(switch: str, device: torch.device) -> None:
    model = four_experts()
    plan = make_plan(small_config(*overrides("deepgemm", switch)), model, 1)
    fused = plan_of("deepgemm", "fp8")
    weights = SeededWeights(model, model.expert_size, 0, device).layer(0, range(4)).experts
    counts = LOADS["odd"]
    rows, _ = make_rows(plan, counts, device)
    batch = MaskedBatch(rows, torch.tensor(counts, dtype=torch.int32, device=device), 8)
    outs = []
    for each in (plan, fused):
        experts = build_experts(each, device)
        outs.append(experts(batch, experts.prepare(weights), no_mark).clone())
    for expert, count in enumerate(counts):
        assert (row_errors(outs[0][expert, :count], outs[1][expert, :count]) < 1e-2).all()
