"""DeepEP's high-throughput calls: the contract on a double that polices them, and on the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epdecode.batch import Route
from epdecode.build import build
from epdecode.graphs import fill
from epdecode.inputs import make_batches
from epdecode.plan import Plan, make_plan
from epdecode.transport import build_transport
from epdecode.verify import fp8_tolerance, row_errors, verify_step
from epdecode.warmup import compile_all
from epdecode.world import World
from tests.fakes import deep_ep_ht
from tests.fakes.deep_ep import FakeMisuse
from tests.ranks import RankFailed, run_ranks
from tests.small import ll_model, plain_router, small_config
from tests.transport.packed import packed_plan
from tests.transport.test_contract import TOKENS, inputs
from tests.transport.test_packed import check

SHARED = [
    "transport.max_tokens_per_rank=8",
    "batch.tokens_per_rank=8",
    "batch.buckets=[4,8]",
    "experts.name=torch_loop",
    "graph.enabled=false",
    "hardware.device=cpu",
    "run.steps=3",
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("worst_case", ["true", "false"])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_rows_come_back_weighted_and_summed(wire: str, worst_case: str, size: int) -> None:
    plan = packed_plan(
        "deepep_ht", size, f"transport.wire={wire}", f"transport.worst_case_rows={worst_case}"
    )
    check(plan, TOKENS[size])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("worst_case", ["true", "false"])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_rows_come_back_weighted_and_summed_on_the_gpu(
    wire: str, worst_case: str, size: int
) -> None:
    plan = packed_plan(
        "deepep_ht", size, f"transport.wire={wire}", f"transport.worst_case_rows={worst_case}"
    )
    check(plan, TOKENS[size], cuda=True)


def buffer_of(world: World, plan: Plan) -> tuple[int, int]:
    deep_ep_ht.install()
    transport = build_transport(plan, world)
    sizes = transport.nvl_bytes, transport.rdma_bytes
    transport.close()
    return sizes


def test_the_buffer_has_the_larger_hint_and_the_plan_says_so() -> None:
    plan = packed_plan("deepep_ht", 2, "transport.num_sms=24")
    for sizes in run_ranks(2, buffer_of, plan):
        assert sizes == (plan.transport.nvl_bytes, 0)


def test_a_smaller_buffer_is_caught_by_the_double() -> None:
    plan = packed_plan("deepep_ht", 2)
    with pytest.raises(RankFailed, match="smaller than the config's hint"):
        run_ranks(2, shrunk, plan)


def shrunk(world: World, plan: Plan) -> None:
    deep_ep_ht.install()
    transport = build_transport(plan, world)
    transport._buffer.num_nvl_bytes -= 128
    x, route = inputs(plan, [2, 2], 0)[world.rank]
    transport.dispatch(x, route)


def too_many(world: World, plan: Plan) -> str:
    deep_ep_ht.install()
    transport = build_transport(plan, world)
    transport._worst_case = 3
    x, route = inputs(plan, [8, 8], 0)[world.rank]
    try:
        transport.dispatch(x, route)
    except FakeMisuse as error:
        return str(error)
    return "nothing raised"


def test_fewer_worst_case_rows_than_arrive_are_caught_by_the_double() -> None:
    plan = packed_plan("deepep_ht", 2, "transport.worst_case_rows=true")
    for message in run_ranks(2, too_many, plan):
        assert "memory is overwritten" in message


def early_reader(world: World, plan: Plan) -> bool:
    """Outputs of combine before and after waiting for them."""
    deep_ep_ht.install()
    transport = build_transport(plan, world)
    x, route = inputs(plan, [4, 4], 0)[world.rank]
    batch = transport.dispatch(x, route).wait()
    rows = torch.zeros(plan.transport.packed_rows, plan.model.hidden, dtype=torch.bfloat16)
    returning = transport.combine(rows, batch, route)
    out = returning.wait()
    transport.close()
    return bool(torch.isfinite(out).all())


def test_results_are_waited_for() -> None:
    assert run_ranks(2, early_reader, packed_plan("deepep_ht", 2)) == [True, True]


def without_tokens(world: World, plan: Plan) -> tuple[int, ...]:
    """Ids that are an empty slice of real memory, weights that have none."""
    deep_ep_ht.install()
    transport = build_transport(plan, world)
    x, route = inputs(plan, [2, 2], 0)[world.rank]
    none = Route(route.topk_ids[:0], torch.zeros(0, plan.model.top_k))
    batch = transport.dispatch(x[:0], none).wait()
    rows = torch.zeros(plan.transport.packed_rows, plan.model.hidden, dtype=torch.bfloat16)
    out = transport.combine(rows, batch, none).wait()
    transport.close()
    return tuple(out.shape)


def test_an_empty_batch_of_any_make_is_dispatched() -> None:
    plan = packed_plan("deepep_ht", 2)
    assert run_ranks(2, without_tokens, plan) == [(0, plan.model.hidden)] * 2


def two_nodes(world: World, plan: Plan) -> None:
    deep_ep_ht.install()
    build_transport(plan, replace(world, local_size=1))


def test_ranks_of_one_group_on_two_nodes_are_refused() -> None:
    with pytest.raises(RankFailed, match="2 ranks, 1 of them on this node; accepted: 2 a node"):
        run_ranks(2, two_nodes, packed_plan("deepep_ht", 2))


def verified(world: World, overrides: list[str]) -> tuple[bool, int]:
    deep_ep_ht.install()
    config, model = small_config(*SHARED, *overrides), ll_model(router=plain_router())
    plan = make_plan(config, model, world.size)
    runtime = build(config, plan, world)
    compile_all(runtime)
    verification = verify_step(runtime, runtime.eager(), make_batches(config, plan, world))
    runtime.close()
    return verification.passed, verification.rows


@pytest.mark.parametrize(
    "overrides",
    [
        ["transport.wire=fp8"],
        ["transport.wire=bf16", "transport.worst_case_rows=true"],
        ["routing.kind=stress", "transport.worst_case_rows=true"],
        ["transport.fused_reduce=false"],
    ],
    ids=" ".join,
)
def test_the_whole_layer_is_verified(overrides: list[str]) -> None:
    for passed, rows in run_ranks(2, verified, ["transport.name=deepep_ht", *overrides]):
        assert passed
        assert rows > 0


def both_modes(world: World) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Low latency and high throughput in turn in one process, each on its own config's batches."""
    deep_ep_ht.install()
    model = ll_model(router=plain_router())
    modes = []
    for name in ("deepep_ll", "deepep_ht"):
        config = small_config(*SHARED, f"transport.name={name}", "routing.kind=uniform")
        plan = make_plan(config, model, world.size)
        runtime = build(config, plan, world)
        modes.append((runtime, runtime.eager(), make_batches(config, plan, world)))
    outputs = []
    for index in range(3):
        pair = []
        for _, step, batches in modes:
            planned = batches[index]
            fill(step.inputs, planned.batch, planned.bucket)
            tokens = planned.batch.hidden.shape[0]
            pair.append(step(planned.bucket).hidden[:tokens].clone())
        outputs.append((pair[0], pair[1]))
    for runtime, _, _ in modes:
        runtime.close()
    return outputs


def test_both_modes_in_one_process_agree_on_the_same_batches() -> None:
    for outputs in run_ranks(2, both_modes):
        for low_latency, high_throughput in outputs:
            assert (row_errors(high_throughput, low_latency) <= fp8_tolerance(128)).all()
