"""What every transport promises, checked on every registered member.

Every rank makes all ranks' inputs from seeds, so the expected result needs no communication. The
experts multiply by a power of two per expert, which no format rounds.
"""

from __future__ import annotations

import pytest
import torch

from epdecode.batch import Fp8Rows, MaskedBatch, Route
from epdecode.errors import UserError
from epdecode.kernels.fp8 import dequantize, quantize_ref
from epdecode.plan import Plan
from epdecode.transport import MEMBERS, build_transport
from epdecode.verify import row_errors, tolerance
from epdecode.world import World
from tests.conftest import GPU
from tests.fakes import deep_ep as fake_deep_ep
from tests.ranks import RankFailed, run_ranks
from tests.small import ll_model, plain_router, random_route, small_plan

TOKENS = {1: [5], 2: [7, 0], 4: [3, 0, 1, 0]}
MASKED = sorted(set(MEMBERS) & {"torch_a2a", "deepep_ll"})


def plan_of(member: str, wire: str, size: int) -> Plan:
    return small_plan(
        size,
        f"transport.name={member}",
        f"transport.wire={wire}",
        "transport.max_tokens_per_rank=8",
        "batch.tokens_per_rank=8",
        "batch.buckets=[1,2,4,8]",
        model=ll_model(router=plain_router()),
    )


def inputs(plan: Plan, tokens: list[int], step: int) -> list[tuple[torch.Tensor, Route]]:
    """(x, route) of every rank."""
    made = []
    for rank, count in enumerate(tokens):
        gen = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(count, plan.model.hidden, generator=gen).to(torch.bfloat16)
        ids, weights = random_route(count, plan.model.top_k, plan.num_experts, gen)
        if count:
            ids[0] = -1
        made.append((x, Route(ids, weights)))
    return made


def gain(expert: int) -> float:
    return 2.0 ** (expert % 4)


def on_wire(x: torch.Tensor, wire: str) -> torch.Tensor:
    return dequantize(quantize_ref(x)) if wire == "fp8" else x.float()


def expected(x: torch.Tensor, route: Route, wire: str) -> torch.Tensor:
    total = torch.zeros(x.shape)
    for token in range(x.shape[0]):
        for slot, expert in enumerate(route.topk_ids[token].tolist()):
            if expert >= 0:
                row = (on_wire(x[token : token + 1], wire) * gain(expert)).to(torch.bfloat16)
                total[token] += row[0].float() * route.topk_weights[token, slot]
    return total.to(torch.bfloat16)


def apply_gains(batch: MaskedBatch, rank: int) -> torch.Tensor:
    rows = batch.rows
    plain = dequantize(rows) if isinstance(rows, Fp8Rows) else rows.float()
    out = torch.full(plain.shape, torch.nan, dtype=torch.bfloat16, device=plain.device)
    for expert, count in enumerate(batch.counts.tolist()):
        number = rank * len(batch.counts) + expert
        out[expert, :count] = (plain[expert, :count] * gain(number)).to(torch.bfloat16)
    return out


def round_trips(
    world: World, plan: Plan, tokens: list[int], steps: int, fake: bool
) -> list[tuple[torch.Tensor, list[int]]]:
    """Each step's combined output and counts on this rank."""
    if fake:
        fake_deep_ep.install()
    transport = build_transport(plan, world)
    done = []
    for step in range(steps):
        x, route = inputs(plan, tokens, step)[world.rank]
        x = x.to(world.device)
        route = Route(route.topk_ids.to(world.device), route.topk_weights.to(world.device))
        apart = step != 1
        batch = transport.dispatch(x, route, apart).wait()
        counts = batch.counts.tolist()
        out = transport.combine(apply_gains(batch, world.rank), batch, route, apart).wait()
        done.append((out.cpu().clone(), counts))
    transport.close()
    return done


def check(member: str, wire: str, size: int, *, cuda: bool) -> None:
    plan, tokens, steps = plan_of(member, wire, size), TOKENS[size], 3
    results = run_ranks(
        size, round_trips, plan, tokens, steps, not cuda and member != "torch_a2a", cuda=cuda
    )
    for step in range(steps):
        everyone = inputs(plan, tokens, step)
        chosen = torch.cat([route.topk_ids.flatten() for _, route in everyone])
        for rank, (x, route) in enumerate(everyone):
            out, counts = results[rank][step]
            first = rank * plan.num_local_experts
            wanted = [int((chosen == first + e).sum()) for e in range(plan.num_local_experts)]
            assert counts == wanted
            assert out.shape == (tokens[rank], plan.model.hidden)
            right = expected(x, route, wire)
            if cuda:
                # The library's own FP8 cast may round a value to its other neighbour.
                assert (row_errors(out, right) <= tolerance(plan)).all()
            else:
                # Summation order may differ in float32's last bit, before rounding to bfloat16.
                torch.testing.assert_close(out.float(), right.float(), rtol=2**-8, atol=1e-5)
            if tokens[rank]:
                assert (out[0] == 0).all(), "a token without experts is exactly zero"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
@pytest.mark.parametrize("member", MASKED)
def test_rows_come_back_weighted_and_summed(member: str, wire: str, size: int) -> None:
    check(member, wire, size, cuda=False)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
@pytest.mark.parametrize("member", MASKED)
def test_rows_come_back_weighted_and_summed_on_the_gpu(member: str, wire: str, size: int) -> None:
    check(member, wire, size, cuda=GPU)


def all_to_one(world: World, plan: Plan) -> list[int]:
    transport = build_transport(plan, world)
    x = torch.randn(16, plan.model.hidden).to(torch.bfloat16)
    ids = torch.tensor([[0, 1]]).repeat(16, 1)
    route = Route(ids, torch.full((16, 2), 0.5))
    batch = transport.dispatch(x, route).wait()
    rows = batch.rows if isinstance(batch.rows, torch.Tensor) else dequantize(batch.rows)
    out = transport.combine(rows.to(torch.bfloat16), batch, route).wait()
    torch.testing.assert_close(out, x, rtol=0, atol=0)
    return batch.counts.tolist()


def test_every_token_to_one_rank_fits() -> None:
    plan = small_plan(4, "transport.wire=bf16")
    counts = run_ranks(4, all_to_one, plan)
    assert counts == [[64, 64], [0, 0], [0, 0], [0, 0]]


def one_too_many(world: World, plan: Plan) -> str:
    transport = build_transport(plan, world)
    tokens = plan.max_tokens + world.rank
    x = torch.zeros(tokens, plan.model.hidden, dtype=torch.bfloat16)
    ids = torch.zeros(tokens, plan.model.top_k, dtype=torch.int64)
    if world.rank == 0:
        return ""
    try:
        transport.dispatch(x, Route(ids, torch.ones(ids.shape)))
    except UserError as error:
        return str(error)
    return "nothing raised"


def test_a_batch_above_the_limit_is_refused_before_it_is_sent() -> None:
    message = run_ranks(2, one_too_many, small_plan(2))[1]
    assert "17 tokens" in message
    assert "max_tokens_per_rank is 16" in message


def fp16_rows(world: World, plan: Plan) -> None:
    fake_deep_ep.install()
    transport = build_transport(plan, world)
    x = torch.zeros(4, plan.model.hidden, dtype=torch.float16)
    ids = torch.zeros(4, plan.model.top_k, dtype=torch.int64)
    transport.dispatch(x, Route(ids, torch.ones(ids.shape)))


def test_low_latency_refuses_fp16() -> None:
    with pytest.raises(RankFailed, match=r"dispatch of torch.float16; deepep_ll takes torch.bf"):
        run_ranks(1, fp16_rows, plan_of("deepep_ll", "bf16", 1))
