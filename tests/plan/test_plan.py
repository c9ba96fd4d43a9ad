"""The plan: what follows from a config, and what it refuses before anything is allocated."""

from __future__ import annotations

import json

import pytest

from epdecode.config.load import load_config, load_model
from epdecode.errors import ConfigError
from epdecode.models import ModelShape
from epdecode.plan import Plan, make_plan, render, to_json
from epdecode.plan.hardware import DEVICES
from tests.small import small_config, small_model, small_plan

PRESET = "deepseek_v3-h200-deepep_ll"


def preset_plan(world_size: int, *overrides: str, ranks_per_gpu: int = 1) -> Plan:
    config = load_config(PRESET, overrides)
    return make_plan(config, load_model(config.model), world_size, ranks_per_gpu=ranks_per_gpu)


def test_low_latency_buffer_queue_pairs_and_placement() -> None:
    plan = preset_plan(8)
    assert plan.transport.rdma_bytes == 1908410496
    assert plan.transport.num_qps == 32
    assert plan.transport.qp_depth == 1024
    assert plan.capacity == 1024
    assert list(plan.local_experts(7)) == list(range(224, 256))


def test_depth_grows_with_the_batch() -> None:
    big = "transport.max_tokens_per_rank=512"
    assert preset_plan(8, big, "batch.buckets=[512]").transport.qp_depth == 2048


def test_depth_set_too_small_in_the_environment_is_refused() -> None:
    config = load_config(PRESET, ["transport.max_tokens_per_rank=512"])
    with pytest.raises(ConfigError, match="NVSHMEM_QP_DEPTH=256"):
        make_plan(config, load_model(config.model), 8, qp_depth_set=256)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_preset_fits_one_h200_however_many_ranks_share_it(ranks: int) -> None:
    plan = preset_plan(ranks, ranks_per_gpu=ranks)
    assert ranks * plan.memory_bytes < DEVICES["h200"].memory_bytes
    assert plan.shared_gpu == (ranks > 1)


def test_what_cannot_fit_is_refused_with_the_largest_share_first() -> None:
    with pytest.raises(ConfigError, match=r"memory: 1 rank.*share in GiB: weights"):
        preset_plan(1, "layers=20")


def test_every_structural_mistake_is_reported_at_once() -> None:
    config = small_config("parallel.ep=4", "layers=9", "graph.enabled=true")
    with pytest.raises(ConfigError) as error:
        make_plan(config, small_model(), 2)
    for said in (
        "parallel.ep: got 4 with 2 ranks",
        "layers: got 9; tiny has 4 MoE layers",
        "graph.enabled: torch_a2a",
    ):
        assert said in str(error.value)


def test_a_bucket_above_the_dispatch_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch.buckets: got 32, accepted: up to .* = 16"):
        small_config("batch.buckets=[1,8,16,32]")


def test_groups_that_cannot_reach_top_k_are_refused() -> None:
    config = small_config("parallel.stand_in_ep=4")
    with pytest.raises(ConfigError, match="n_group"):
        make_plan(config, small_model(), 1)


def test_stand_in_takes_the_share_of_a_larger_group() -> None:
    config = load_config("deepseek_v3-h200-ep8_share")
    plan = make_plan(config, load_model(config.model), 1)
    assert plan.num_experts == plan.num_local_experts == 32
    assert plan.weight_floor_us == pytest.approx(323.2, rel=0.01)


def test_worst_case_memory_has_room_for_all_tokens_on_one_rank() -> None:
    model: ModelShape = small_model()
    one = small_plan(1)
    four = small_plan(4)
    rows = lambda plan: plan.num_local_experts * plan.capacity  # noqa: E731
    assert rows(four) == rows(one) == 8 * 16
    assert one.memory["receive"] == rows(one) * (model.hidden + model.hidden // 32)


def test_packed_scales_on_hopper_are_refused_for_deepgemm() -> None:
    with pytest.raises(ConfigError, match=r"ue8m0 with deepgemm on compute capability 9\.0"):
        preset_plan(1, "experts.name=deepgemm", "experts.scale_format=ue8m0")


def test_the_plan_is_plain_data_and_text() -> None:
    plan = preset_plan(8)
    assert json.loads(json.dumps(to_json(plan), allow_nan=False))["num_local_experts"] == 32
    text = render(plan)
    assert "worst case" in text
    assert "1908410496 bytes (1.78 GiB)" in text


def test_one_launch_for_all_expert_stages_is_spared_their_intermediates() -> None:
    plan = preset_plan(8)
    floors = plan.floors
    parts = [floors[stage] for stage in ("gate_up_gemm", "act_quant", "down_gemm")]
    whole, size = floors["expert_chain"], plan.model.expert_size
    rows = plan.tokens_per_rank * plan.model.top_k
    intermediates = rows * (4 * size + 4 * size + 2 * (size + size // 32))
    assert whole.flops == sum(part.flops for part in parts)
    assert whole.bytes == pytest.approx(sum(part.bytes for part in parts) - intermediates, rel=1e-6)


def test_floors_have_no_microseconds_without_a_device() -> None:
    plan = small_plan(1)
    assert plan.device is None
    assert {floor.floor_us for floor in plan.floors.values()} == {None}
    assert plan.floors["gate_up_gemm"].bytes > 0


def test_a_capacity_that_breaks_deepgemms_masked_tiles_is_refused_with_the_nearest() -> None:
    odd = ("transport.max_tokens_per_rank=48", "batch.buckets=[32]", "batch.tokens_per_rank=32")
    with pytest.raises(ConfigError, match=r"2 ranks x 48 tokens .* 96 rows.*nearest 64"):
        preset_plan(2, "experts.name=deepgemm", *odd)
    assert preset_plan(8, "experts.name=deepgemm", *odd).capacity == 384
    assert preset_plan(2, "experts.name=triton_gemm", *odd).capacity == 96


def test_bf16_weights_go_where_they_are_taken() -> None:
    bf16 = "weights.format=bf16"
    assert preset_plan(8, bf16, "transport.wire=bf16").experts.name == "triton_gemm"
    with pytest.raises(ConfigError, match="transport.wire: got fp8 with bf16 weights"):
        preset_plan(8, bf16)
    with pytest.raises(ConfigError, match="deepgemm takes FP8 weights, these are bf16"):
        preset_plan(8, bf16, "experts.name=deepgemm")
