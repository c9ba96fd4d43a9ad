"""Which kernels each bucket gets, what `auto` becomes, and what the plan says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epdecode.config.load import load_config, load_model
from epdecode.errors import ConfigError
from epdecode.experts.chains import LEAST_CAPACITY as CHAINS_LEAST
from epdecode.experts.chains import ChainShape, why_not_fused
from epdecode.plan import make_plan, render, to_json
from epdecode.plan.expert_choice import Choice, ExpertShape, choose
from epdecode.plan.expert_loads import (
    LEAST_CAPACITY,
    Kernels,
    Load,
    choice_at,
    describe,
    routed_rows,
    why_not_one_kernel,
)
from epdecode.plan.limit_rule import Request
from epdecode.transport.rehearsal import expected_rows

SHARE = "deepseek_v3-h200-ep8_share"
QWEN = "qwen3_30b-h200-ep8_share"
ROUTED = ExpertShape(experts=32, hidden=7168, size=2048)
MANY_ROWS = ("transport.max_tokens_per_rank=512", "batch.buckets=[128,512]")


def plan_of(preset, *overrides, ranks=1, **facts):
    config = load_config(preset, overrides)
    return make_plan(config, load_model(config.model), ranks, **facts)


def cuts(loads):
    return {load.bucket: load.choice for load in loads}


@pytest.mark.parametrize("preset", [SHARE, QWEN])
def test_auto_on_hopper_is_tuned_and_every_bucket_follows_the_rule(preset):
    plan = plan_of(preset)
    assert plan.experts.name == "tuned"
    assert plan.chosen["experts.name"].startswith("tuned: ")
    assert [load.bucket for load in plan.experts.loads] == list(plan.buckets)
    shape = ExpertShape(
        experts=plan.num_local_experts, hidden=plan.model.hidden, size=plan.model.expert_size
    )
    for load in plan.experts.loads:
        assert load.rows == expected_rows(plan, load.bucket)
        assert load.choice == choose(shape, load.rows, {})
        assert load.source == "rule"


@pytest.mark.parametrize(
    ("kind", "tokens"), [("balanced", 16), ("model", 32), ("uniform", 32), ("zipf", 64)]
)
def test_the_cut_goes_by_the_fuller_experts_of_the_routing(kind, tokens):
    plan = plan_of(SHARE, f"routing.kind={kind}")
    load = next(load for load in plan.experts.loads if load.bucket == 64)
    assert load.rows == 16
    assert load.choice.tokens == tokens


def test_a_table_is_followed_and_said():
    table = {ROUTED.key: {32: Choice(tokens=64, stages=3, narrow=False), 16: Choice(stages=2)}}
    plan = plan_of(SHARE, kernels=Kernels(table=table))
    by_bucket = {load.bucket: load for load in plan.experts.loads}
    assert by_bucket[128].choice == table[ROUTED.key][32]
    assert by_bucket[64].choice == table[ROUTED.key][16]
    assert {by_bucket[at].source for at in (64, 128)} == {"table"}
    assert by_bucket[1].source == "rule"
    said = plan.chosen["experts.loads"]
    assert "128: triton_gemm tokens=64 stages=3 narrow=False" in said
    assert said.endswith("(table)")
    assert said in render(plan)
    assert to_json(plan)["experts"]["loads"][-1]["choice"]["tokens"] == 64


@pytest.mark.parametrize(
    ("overrides", "facts", "why"),
    [
        ((), {}, ""),
        ((), {"kernels": Kernels(deepgemm=False)}, "not installed"),
        (("transport.max_tokens_per_rank=516",), {}, "no multiple of its 128-row tiles"),
    ],
)
def test_deepgemm_takes_the_loads_the_table_gives_it_where_it_can(overrides, facts, why):
    table = {ROUTED.key: {128: Choice(backend="deepgemm", tokens=64)}}
    kernels = replace(facts.get("kernels", Kernels()), table=table)
    plan = plan_of(SHARE, *MANY_ROWS, *overrides, kernels=kernels)
    made = cuts(plan.experts.loads)
    assert made[128].backend == "triton_gemm"
    assert made[512].backend == ("triton_gemm" if why else "deepgemm")
    assert made[512].tokens == 64
    assert plan.experts.backends == (("triton_gemm",) if why else ("deepgemm", "triton_gemm"))
    assert why in plan.chosen["experts.loads"]
    assert ("without DeepGEMM" in plan.chosen["experts.loads"]) is bool(why)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("hardware.device=b200",), "compute capability 10.0 is not 9.x"),
        (("hardware.device=gb200", "experts.scale_format=fp32"), "compute capability 10.0"),
    ],
)
def test_auto_stays_deepgemm_where_the_one_kernel_chain_cannot_run(overrides, why):
    plan = plan_of(SHARE, *overrides)
    assert plan.experts.name == "deepgemm"
    assert why in plan.chosen["experts.name"]
    assert plan.experts.loads == ()


def test_auto_takes_what_is_left_for_other_layouts_and_formats():
    assert plan_of("deepseek_v3-h200x8-deepep_ht", ranks=8).experts.name == "deepgemm"
    assert (
        plan_of(SHARE, "weights.format=bf16", "transport.wire=bf16").experts.name == "triton_gemm"
    )
    assert plan_of("cpu-tiny").experts.name == "torch_loop"


@pytest.mark.parametrize("name", ["triton_gemm", "tuned"])
def test_packed_rows_are_refused_in_the_plan(name):
    with pytest.raises(ConfigError, match=f"experts.name: {name} takes no packed rows; accepted"):
        plan_of("deepseek_v3-h200x8-deepep_ht", f"experts.name={name}", ranks=8)


def test_beside_the_routed_chain_the_shared_expert_takes_deepgemm():
    plan = plan_of(SHARE)
    assert {load.choice.backend for load in plan.experts.shared_loads} == {"deepgemm"}
    assert [load.rows for load in plan.experts.shared_loads] == list(plan.buckets)
    assert not plan.experts.shared_in_line
    assert "deepgemm" in plan.chosen["experts.shared_loads"]
    assert plan_of(QWEN).experts.shared_loads == ()


def test_in_line_the_shared_expert_takes_what_the_rule_or_table_says():
    one = ExpertShape(experts=1, hidden=7168, size=2048)
    table = {one.key: {16: Choice(stages=3)}}
    plan = plan_of(SHARE, "overlap.shared_expert=false", kernels=Kernels(table=table))
    assert cuts(plan.experts.shared_loads)[16] == Choice(stages=3)
    for load in plan.experts.shared_loads:
        assert load.choice == choose(one, load.rows, table)
        assert load.source == ("table" if load.bucket == 16 else "rule")
    assert "overlap.shared_expert" not in plan.chosen


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("triton_gemm", Kernels()), ("tuned", Kernels(deepgemm=False))],
)
def test_two_chains_of_ours_never_run_at_once(name, kernels):
    plan = plan_of(SHARE, f"experts.name={name}", kernels=kernels)
    assert {load.choice.backend for load in plan.experts.shared_loads} == {"triton_gemm"}
    assert plan.experts.shared_in_line
    assert "slow each other" in plan.chosen["overlap.shared_expert"]
    bf16 = ("weights.format=bf16", "transport.wire=bf16")
    two_kernels = plan_of(SHARE, f"experts.name={name}", *bf16, kernels=kernels)
    assert not two_kernels.experts.shared_in_line


@pytest.mark.parametrize(("rows", "tokens"), [(1, 16), (4, 16), (5, 32), (8, 32), (500, 32)])
def test_rows_between_and_beyond_the_loads_take_a_planned_choice(rows, tokens):
    loads = [
        Load(bucket=at, rows=at, fuller_rows=at, choice=Choice(tokens=cut), source="rule")
        for at, cut in ((4, 16), (8, 32))
    ]
    assert choice_at(loads, rows).tokens == tokens


def test_neighbours_that_agree_are_said_together():
    loads = [
        Load(bucket=at, rows=at, fuller_rows=at, choice=Choice(backend=name), source=source)
        for at, name, source in (
            (1, "triton_gemm", "rule"),
            (2, "triton_gemm", "rule"),
            (4, "triton_gemm", "table"),
            (8, "deepgemm", "rule"),
        )
    ]
    said = describe(loads)
    assert said.startswith("1 to 2: triton_gemm tokens=16 ")
    assert said.endswith("(table); 8: deepgemm (rule)")


def test_routed_rows_are_at_least_one():
    request = Request(
        transport="deepep_ll", wire="fp8", hidden=7168, expert_size=2048, top_k=8,
        num_experts=256, ep=8, max_tokens=128,
    )  # fmt: skip
    assert [routed_rows(request, tokens) for tokens in (0, 1, 4, 5, 128)] == [1, 1, 1, 2, 32]


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [512, 384])
@pytest.mark.parametrize("size", [256, 320])
@pytest.mark.parametrize("capacity", [32, 64, 66, 1024])
@pytest.mark.parametrize("packed", [False, True])
def test_the_plan_and_the_chain_agree(hidden, size, capacity, packed, device):
    shape = ExpertShape(experts=4, hidden=hidden, size=size)
    chain = ChainShape(shape=shape, capacity=capacity, fp8=True, packed_scales=packed)
    planned = why_not_one_kernel(shape, capacity, packed_scales=packed, capability=(9, 0))
    assert bool(planned) is bool(why_not_fused(chain, device))
    assert LEAST_CAPACITY == CHAINS_LEAST
