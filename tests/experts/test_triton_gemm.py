"""triton_gemm beyond the contract all members share: tiles, refusals, the fused kernel's counters.

The interpreter truncates e4m3 casts, so its tolerance here is wide; the contract test on the GPU
holds this member to the same tolerance as the others.
"""

from __future__ import annotations

import logging

import pytest
import torch

from epdecode.batch import ExpertWeights, Fp8Rows, MaskedBatch, no_mark
from epdecode.errors import ConfigError
from epdecode.experts.chains import ChainShape, build_chain, why_not_fused
from epdecode.experts.reference import expert_mlp, plain, plain_weights, select
from epdecode.experts.triton_gemm import TritonGemm
from epdecode.kernels.fp8 import mn_major_scales, quantize_block, quantize_ref
from epdecode.plan.expert_choice import Choice, ExpertShape
from epdecode.verify import fp8_tolerance
from tests.small import plain_router, small_model, small_plan

HIDDEN, SIZE, EXPERTS, CAPACITY = 512, 256, 3, 132
CPU = torch.device("cpu")
CLOSE = fp8_tolerance(SIZE)
"""The fused kernel rounds no bfloat16 intermediate, so some activations fall on other FP8 steps."""


def model(weight_format="fp8_block128"):
    return small_model(
        hidden=HIDDEN,
        expert_size=SIZE,
        num_experts=EXPERTS,
        num_shared_experts=0,
        router=plain_router(),
        weight_format=weight_format,
    )


def plan(*overrides, weight_format="fp8_block128"):
    asked = ["experts.name=triton_gemm", f"transport.max_tokens_per_rank={CAPACITY}", *overrides]
    return small_plan(1, *asked, model=model(weight_format))


def make_weights(device, fp8=True):
    def draw(rows, columns):
        values = torch.randn(EXPERTS, rows, columns, device=device) / columns**0.5
        return quantize_block(values) if fp8 else values.bfloat16()

    return ExpertWeights(draw(2 * SIZE, HIDDEN), draw(HIDDEN, SIZE))


def make_batch(counts, device, expected_rows=8, fp8=True):
    """Random rows, NaN past the counts."""
    rows = torch.full((EXPERTS, CAPACITY, HIDDEN), torch.nan, device=device).bfloat16()
    for expert, count in enumerate(counts):
        rows[expert, :count] = torch.randn(count, HIDDEN, device=device).bfloat16()
    on_device = torch.tensor(counts, dtype=torch.int32, device=device)
    if not fp8:
        return MaskedBatch(rows, on_device, expected_rows)
    data = rows.float().to(torch.float8_e4m3fn)
    scales = mn_major_scales(EXPERTS, CAPACITY, HIDDEN // 128, "fp32", device).fill_(torch.nan)
    for expert, count in enumerate(counts):
        made = quantize_ref(rows[expert, :count])
        data[expert, :count], scales[expert, :count] = made.data, made.scales
    return MaskedBatch(Fp8Rows(data, scales), on_device, expected_rows)


def errors(out, batch, weights, scale_format="fp32"):
    """Relative error of each expert's valid rows."""
    found = []
    for expert, count in enumerate(batch.counts.tolist()):
        rows = batch.rows
        head = (
            Fp8Rows(rows.data[expert, :count], rows.scales[expert, :count])
            if isinstance(rows, Fp8Rows)
            else rows[expert, :count]
        )
        gate_up, down = (select(matrix, expert) for matrix in (weights.gate_up, weights.down))
        want = expert_mlp(plain(head), plain_weights(gate_up), plain_weights(down), scale_format)
        if count:
            found.append(((out[expert, :count] - want).norm() / want.norm()).item())
    return found


@pytest.mark.parametrize("counts", [[7, 0, 40], [0, 0, 0], [64, 64, 1]])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_fp8_weights(counts, wire):
    member = TritonGemm(plan(f"transport.wire={wire}"), CPU)
    weights, batch = make_weights(CPU), make_batch(counts, CPU, fp8=wire == "fp8")
    out = member(batch, member.prepare(weights), no_mark)
    assert all(error < 0.15 for error in errors(out, batch, weights))


@pytest.mark.parametrize("counts", [[7, 0, 40], [0, 0, 0]])
def test_bfloat16_weights(counts):
    member = TritonGemm(plan("transport.wire=bf16", weight_format="bf16"), CPU)
    weights, batch = make_weights(CPU, fp8=False), make_batch(counts, CPU, fp8=False)
    out = member(batch, member.prepare(weights), no_mark)
    assert all(error < 0.02 for error in errors(out, batch, weights, None))


@pytest.mark.parametrize("hint", [1, 16, 33, 500])
def test_the_hint_bounds_nothing(hint):
    member = TritonGemm(plan(), CPU)
    weights, batch = make_weights(CPU), make_batch([50, 3, 0], CPU, expected_rows=hint)
    out = member(batch, member.prepare(weights), no_mark)
    assert all(error < 0.15 for error in errors(out, batch, weights))


def test_stages_are_marked_in_order():
    member, marks = TritonGemm(plan(), CPU), []
    weights, batch = make_weights(CPU), make_batch([1, 1, 1], CPU)
    member(batch, member.prepare(weights), marks.append)
    assert marks == ["gate_up_gemm", "down_gemm"]


def test_weights_of_another_format_are_refused():
    member = TritonGemm(plan(), CPU)
    with pytest.raises(ConfigError, match="built for fp8_block128 weights and gate_up is not"):
        member.prepare(make_weights(CPU, fp8=False))


def test_two_kernels_are_chosen_aloud_where_the_fused_one_cannot_run(caplog):
    caplog.set_level(logging.INFO)
    TritonGemm(plan(), CPU)
    assert "two kernels, not one: no GPU" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fp8": False}, "weights are bfloat16"),
        ({"packed_scales": True}, "scales are packed"),
        ({"capacity": 66}, "capacity 66 is no multiple of 4"),
        ({"capacity": 32}, "from 64 up"),
        ({}, ""),
    ],
)
def test_why_not_fused(fields, reason, device):
    shape = ExpertShape(experts=EXPERTS, hidden=HIDDEN, size=SIZE)
    asked = {"shape": shape, "capacity": CAPACITY, "fp8": True, "packed_scales": False, **fields}
    said = why_not_fused(ChainShape(**asked), device)
    assert reason in said if reason else not said


CUTS = [
    Choice(tokens=tokens, stages=3, narrow=narrow, splits=splits)
    for tokens, narrow in (
        (16, False),
        (16, True),
        (32, False),
        (32, True),
        (64, False),
        (128, False),
    )
    for splits in (1, 2, 4)
]


@pytest.mark.gpu
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_of_the_fused_kernel(cut, device):
    shape = ExpertShape(experts=EXPERTS, hidden=HIDDEN, size=SIZE)
    chain = build_chain(
        ChainShape(shape=shape, capacity=CAPACITY, fp8=True, packed_scales=False), device
    )
    weights = make_weights(device)
    for counts in ([7, 0, 40], [0, 0, 0], [64, 130, 1], [0, 0, 33]):
        batch = make_batch(counts, device)
        out = torch.full((EXPERTS, CAPACITY, HIDDEN), 9.0, dtype=torch.bfloat16, device=device)
        chain(batch.rows, weights, batch.counts, out, cut, no_mark)
        again, marks = out.clone(), []
        chain(batch.rows, weights, batch.counts, out, cut, marks.append)
        assert marks == ["expert_chain"]
        assert torch.equal(out, again)
        assert max(errors(out, batch, weights), default=0.0) < CLOSE
        for expert, count in enumerate(counts):
            assert (out[expert, count:] == 9.0).all()


@pytest.mark.gpu
def test_one_graph_serves_every_load(device):
    member = TritonGemm(plan(), device)
    weights, batch = make_weights(device), make_batch([64, 64, 64], device)
    member(batch, weights, no_mark)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = member(batch, weights, no_mark)
    for counts in ([64, 64, 64], [0, 0, 0], [1, 0, 50], [0, 64, 0], [16, 17, 18]):
        batch.counts.copy_(torch.tensor(counts, dtype=torch.int32))
        graph.replay()
        assert max(errors(out, batch, weights), default=0.0) < CLOSE
