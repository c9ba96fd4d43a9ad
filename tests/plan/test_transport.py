"""What a transport section leads to: layout, rows, and which modes a CUDA graph can hold."""

from __future__ import annotations

import pytest

from epdecode.config.load import load_config, load_model
from epdecode.errors import ConfigError
from epdecode.plan import Plan, make_plan, render
from epdecode.plan.floors import copies_per_token
from tests.small import small_model, small_plan

PRESET = "deepseek_v3-h200-deepep_ht"


def preset_plan(world_size: int, *overrides: str) -> Plan:
    config = load_config(PRESET, overrides)
    return make_plan(config, load_model(config.model), world_size, ranks_per_gpu=1)


def test_high_throughput_in_graphs_takes_worst_case_rows() -> None:
    plan = preset_plan(8)
    transport = plan.transport
    assert (transport.layout, transport.worst_case_rows) == ("packed", True)
    assert transport.received_rows == 8 * 128
    assert transport.row_alignment == 128
    assert transport.packed_rows == 8 * 1024 + 32 * 128
    assert (transport.nvl_bytes, transport.rdma_bytes) == (335709824, 0)
    assert (transport.num_sms, transport.num_qps) == (20, 0)
    assert "true: a CUDA graph holds no host wait" in plan.chosen["transport.worst_case_rows"]


def test_without_graphs_the_host_waits() -> None:
    plan = preset_plan(8, "graph.enabled=false")
    assert not plan.transport.worst_case_rows
    assert "false: graphs are off" in plan.chosen["transport.worst_case_rows"]


def test_graphs_and_a_host_wait_exclude_each_other() -> None:
    with pytest.raises(ConfigError) as error:
        preset_plan(8, "transport.worst_case_rows=false")
    text = str(error.value)
    assert "graph.enabled: deepep_ht reads the number of received rows on the host" in text
    for remedy in (
        "transport.worst_case_rows: true",
        "graph.enabled: false",
        "transport.name: deepep_ll",
    ):
        assert remedy in text


@pytest.mark.parametrize("rows", ["auto", "true"])
def test_over_several_nodes_graphs_are_never_offered_worst_case_rows(rows: str) -> None:
    with pytest.raises(ConfigError) as error:
        preset_plan(16, f"transport.worst_case_rows={rows}")
    text = str(error.value)
    assert "worst-case rows exist on one node only (up to 8 ranks)" in text
    assert "accepted: graph.enabled: false, or transport.name: deepep_ll" in text


def test_over_several_nodes_worst_case_rows_are_refused_without_graphs_too() -> None:
    with pytest.raises(ConfigError, match=r"transport.worst_case_rows: got true; .* accepted: fal"):
        preset_plan(16, "graph.enabled=false", "transport.worst_case_rows=true")
    plan = preset_plan(16, "graph.enabled=false")
    assert plan.transport.num_qps == plan.transport.num_sms
    assert plan.transport.rdma_bytes > 0


@pytest.mark.parametrize(
    ("name", "layout", "accepted"),
    [("deepep_ll", "packed", "auto, masked"), ("deepep_ht", "masked", "auto, packed")],
)
def test_layouts_a_transport_does_not_deliver_are_refused(
    name: str, layout: str, accepted: str
) -> None:
    with pytest.raises(ConfigError, match=f"got {layout}; accepted with {name}: {accepted}"):
        small_plan(2, f"transport.name={name}", f"transport.layout={layout}")


def test_torch_cannot_be_captured() -> None:
    with pytest.raises(ConfigError, match="torch_a2a goes through the host"):
        small_plan(2, "graph.enabled=true", "transport.layout=packed")


def test_one_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="one rank has nobody to send to"):
        small_plan(1, "transport.name=deepep_ht", "graph.enabled=false")


def test_the_plan_prints_the_worst_case() -> None:
    text = render(preset_plan(8))
    assert "at most 1024 rows, always taken, no host wait" in text
    assert "at most 12288, blocks of 128 rows" in text
    assert "NVLink 335709824 bytes" in text
    assert "176160768 and 25952256 bytes" in text


def test_planned_memory_of_packed_rows() -> None:
    fused, apart = preset_plan(8), preset_plan(8, "transport.fused_reduce=false")
    shared = 128 * (7168 + 224 + 4 * 2048 + 2048 + 64 + 2 * 7168)
    inputs = 2 * 128 * 7168
    assert fused.memory["workspaces"] == sum(fused.experts.workspace_bytes) + shared + inputs
    assert "reduce" not in fused.memory
    assert apart.memory["reduce"] >= 1024 * 8 * 7168 * (2 + 4)
    bf16 = preset_plan(8, "transport.wire=bf16")
    assert bf16.memory["packing"] > 1.4 * fused.memory["packing"]


def test_a_token_is_sent_once_per_rank() -> None:
    assert copies_per_token("masked", 8, 256, 8) == 8
    assert copies_per_token("packed", 8, 256, 1) == 1
    assert copies_per_token("packed", 1, 256, 8) == 1
    assert 5.2 < copies_per_token("packed", 8, 256, 8) < 5.4
    assert copies_per_token("packed", 2, 2, 2) == 2


def test_packed_rows_cost_fewer_bytes_on_the_wire_than_masked() -> None:
    packed = small_plan(4, "transport.layout=packed", model=small_model(top_k=4))
    masked = small_plan(4, model=small_model(top_k=4))
    assert packed.floors["dispatch_send"].bytes < masked.floors["dispatch_send"].bytes
    assert packed.floors["gate_up_gemm"] == masked.floors["gate_up_gemm"]
