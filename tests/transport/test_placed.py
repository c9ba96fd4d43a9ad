"""Placement around a transport: every (token, logical expert) once, on a rank that holds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epdecode.batch import Fp8Rows, Route
from epdecode.build import build
from epdecode.errors import UserError
from epdecode.expert_load import by_logical
from epdecode.graphs import EagerStep, StepBatch, fill
from epdecode.inputs import make_batches
from epdecode.kernels.fp8 import dequantize
from epdecode.plan import Plan, make_plan
from epdecode.transport import build_transport
from epdecode.transport.placed import place
from epdecode.verify import row_errors, verify_step
from epdecode.weights.seeded import part
from epdecode.world import World
from tests.fakes import deep_ep as fake_deep_ep
from tests.ranks import run_ranks
from tests.small import ll_model, plain_router, random_route, small_config, small_model

SKEWED = ["routing.kind=lognormal", "routing.sigma=2"]
BALANCED = ["experts.placement=balanced"]


def plan_of(world_size: int, *overrides: str) -> Plan:
    config = small_config("transport.wire=bf16", *SKEWED, *BALANCED, *overrides)
    return make_plan(config, small_model(router=plain_router()), world_size)


def marked(world: World, plan: Plan, layer: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Experts that write their logical id into their rows' first column and 1 into the second, as
    the slots' owners: what comes back, what should, and the rows this rank's experts received.
    """
    transport = place(build_transport(plan, world), plan, world, layer)
    gen = torch.Generator().manual_seed(world.rank)
    tokens = [7, 0, 16, 1][world.rank]
    ids, weights = random_route(tokens, plan.model.top_k, plan.model.num_experts, gen)
    route = Route(ids, weights)
    x = torch.randn(tokens, plan.model.hidden, generator=gen).to(torch.bfloat16)
    batch = transport.dispatch(x, route).wait()
    rows = batch.rows
    assert not isinstance(rows, Fp8Rows)
    out = torch.zeros_like(rows)
    for slot, expert in enumerate(plan.local_experts(world.rank, layer)):
        out[slot, :, 0], out[slot, :, 1] = expert, 1
    got = transport.combine(out, batch, route).wait()
    valid = torch.where(ids >= 0, weights.nan_to_num(), 0.0)
    wanted = torch.stack(((valid * ids.clamp(min=0)).sum(1), valid.sum(1)), dim=1)
    return got[:, :2].float(), wanted, int(batch.counts.sum())


@pytest.mark.parametrize("redundant", [0, 4, 20])
@pytest.mark.parametrize("layer", [0, 1])
def test_each_choice_runs_once_where_its_expert_is(redundant: int, layer: int) -> None:
    plan = plan_of(4, f"experts.redundant={redundant}")
    assert plan.placement.slots[0] != plan.placement.slots[1], "layers differ in what is hot"
    results = run_ranks(4, marked, plan, layer)
    for got, wanted, _ in results:
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-6)
    chosen = 0
    for rank, tokens in enumerate([7, 0, 16, 1]):
        gen = torch.Generator().manual_seed(rank)
        ids, _ = random_route(tokens, plan.model.top_k, plan.model.num_experts, gen)
        chosen += int((ids >= 0).sum())
    assert sum(count for _, _, count in results) == chosen


def outputs(world: World, overrides: list[str]) -> tuple[torch.Tensor, bool]:
    """A step's hidden states with routes drawn from a skewed distribution; and the verdict."""
    config, model = small_config(*SKEWED, *overrides), small_model()
    plan = make_plan(config, model, world.size)
    runtime = build(config, plan, world)
    batches = make_batches(config, plan, world)
    hidden = torch.randn(9, model.hidden, generator=torch.Generator().manual_seed(world.rank)).to(
        torch.bfloat16
    )
    forced = tuple(
        (ids[:1].repeat(9, 1), weights[:1].repeat(9, 1))
        for ids, weights in make_batches(
            small_config(*SKEWED, *overrides, "batch.vary=false"), plan, world
        )[0].batch.forced
    )
    fill(runtime.inputs, StepBatch(hidden, forced), 16)
    out = EagerStep(runtime.layers, runtime.inputs, runtime.clock)(16).hidden[:9].clone()
    verification = verify_step(runtime, runtime.step(), batches[:2])
    runtime.close()
    return out, verification.passed


@pytest.mark.parametrize("size", [1, 2, 4])
def test_placement_changes_no_output(size: int) -> None:
    """Replicas hold equal weights, whoever computes a row; only its neighbours in the GEMM differ,
    and with them the order of its sums."""
    plain = run_ranks(size, outputs, [])
    redundant = ["experts.redundant=0"] if size == 1 else ["experts.redundant=8"]
    placed = run_ranks(size, outputs, [*BALANCED, *redundant])
    for (before, passed), (after, also_passed) in zip(plain, placed, strict=True):
        assert passed
        assert also_passed
        assert (row_errors(after, before) < 2**-7).all()


def broken_replica(world: World) -> bool:
    """Verification of a run in which one replica's weights are not its expert's."""
    config = small_config(*SKEWED, *BALANCED, "experts.redundant=8", "batch.vary=false")
    plan = make_plan(config, small_model(), world.size)
    runtime = build(config, plan, world)
    first = {slot for slot, _ in plan.first_experts(world.rank, 0)}
    for slot in range(plan.num_local_experts):
        if slot not in first:
            down = part(runtime.weights[0].experts.down, slot, 0, plan.model.hidden)
            assert isinstance(down, Fp8Rows)
            down.scales.mul_(1.5)
    result = verify_step(runtime, runtime.step(), make_batches(config, plan, world)[:2])
    runtime.close()
    return result.passed


def test_a_replica_with_other_weights_is_found() -> None:
    assert run_ranks(2, broken_replica) == [False, False]


def through_low_latency(world: World, plan: Plan) -> list[list[int]]:
    fake_deep_ep.install()
    transport = place(build_transport(plan, world), plan, world, 0)
    counts = []
    for step in range(3):
        gen = torch.Generator().manual_seed(step)
        ids, weights = random_route(8, plan.model.top_k, plan.model.num_experts, gen, holes=False)
        x = torch.randn(8, plan.model.hidden, generator=gen).to(torch.bfloat16)
        route = Route(ids, weights)
        batch = transport.dispatch(x, route).wait()
        rows = dequantize(batch.rows) if isinstance(batch.rows, Fp8Rows) else batch.rows
        out = transport.combine(rows.to(torch.bfloat16), batch, route).wait()
        wanted = x.float() * weights.sum(1, keepdim=True)
        torch.testing.assert_close(out.float(), wanted, rtol=2**-3, atol=2**-3)
        counts.append(batch.counts.tolist())
    transport.close()
    return counts


def test_the_low_latency_buffer_is_built_for_the_slots() -> None:
    model = ll_model(router=plain_router())
    config = small_config(
        "transport.name=deepep_ll", "transport.max_tokens_per_rank=8", "batch.tokens_per_rank=8",
        "batch.buckets=[8]", "experts.redundant=4", *BALANCED, *SKEWED,
    )  # fmt: skip
    plan = make_plan(config, model, 2)
    without = make_plan(replace(config, experts=replace(config.experts, redundant=0)), model, 2)
    assert (plan.num_experts, plan.num_local_experts, plan.transport.num_qps) == (12, 6, 6)
    assert plan.transport.rdma_bytes > without.transport.rdma_bytes
    assert plan.memory["weights"] > without.memory["weights"]
    results = run_ranks(2, through_low_latency, plan)
    for step in range(3):
        assert sum(map(sum, (results[0][step], results[1][step]))) == 2 * 8 * model.top_k


def test_more_rows_than_the_limit_are_refused_by_name() -> None:
    message = run_ranks(1, one_too_many, plan_of(1))[0]
    assert "dispatch of 17 tokens; transport.max_tokens_per_rank is 16" in message


def one_too_many(world: World, plan: Plan) -> str:
    transport = place(build_transport(plan, world), plan, world, 0)
    x = torch.zeros(17, plan.model.hidden, dtype=torch.bfloat16)
    ids = torch.zeros(17, plan.model.top_k, dtype=torch.int64)
    with pytest.raises(UserError) as error:
        transport.dispatch(x, Route(ids, torch.ones(ids.shape)))
    return str(error.value)


def test_contiguous_placement_is_the_bare_transport() -> None:
    plan = make_plan(small_config(), small_model(), 1)
    assert run_ranks(1, is_bare, plan) == [True]


def is_bare(world: World, plan: Plan) -> bool:
    transport = build_transport(plan, world)
    return place(transport, plan, world, 0) is transport


def test_load_is_counted_by_logical_expert() -> None:
    plan = plan_of(2, "experts.redundant=8")
    by_slot = torch.arange(16.0).repeat(4, 1)
    logical = by_logical(by_slot, plan)
    assert logical.shape == (4, 8)
    for line in range(4):
        slots = plan.placement.slots[line % 2]
        expected = [sum(s for s, owner in enumerate(slots) if owner == e) for e in range(8)]
        assert logical[line].tolist() == expected


def test_every_expert_is_computed_once_by_the_reference() -> None:
    plan = plan_of(4, "experts.redundant=4")
    for layer in range(2):
        held = [expert for rank in range(4) for _, expert in plan.first_experts(rank, layer)]
        assert sorted(held) == list(range(8))
        for rank in range(4):
            local = plan.local_experts(rank, layer)
            assert all(local[slot] == expert for slot, expert in plan.first_experts(rank, layer))
