"""The packed all-to-all in plain torch: the contract, then its corners."""

from __future__ import annotations

import pytest
import torch

from epdecode.batch import Route
from epdecode.errors import ConfigError, UserError
from epdecode.kernels.fp8 import quantize_ref
from epdecode.kernels.place_routes import most_packed_rows
from epdecode.plan import Plan, make_plan
from epdecode.transport import PACKED_MEMBERS, build_transport
from epdecode.transport.packing import KERNELS, PLAIN, Packer, Received
from epdecode.verify import row_errors
from epdecode.world import World
from tests.ranks import RankFailed, run_ranks
from tests.small import small_config, small_model
from tests.transport.packed import NAN, packed_plan, round_trips, values
from tests.transport.test_contract import TOKENS, expected, inputs

PARTIAL_SUM = 2**-7
"""Each rank's sum is rounded to bfloat16 before the ranks' sums are added and rounded again."""


def check(plan: Plan, tokens: list[int], steps: int = 2, *, cuda: bool = False) -> None:
    fake = not cuda and plan.transport.name == "deepep_ht"
    results = run_ranks(len(tokens), round_trips, plan, tokens, steps, fake, cuda=cuda)
    for step in range(steps):
        everyone = inputs(plan, tokens, step)
        chosen = torch.cat([route.topk_ids.flatten() for _, route in everyone])
        for rank, (x, route) in enumerate(everyone):
            out, counts = results[rank][step]
            first = rank * plan.num_local_experts
            wanted = [int((chosen == first + e).sum()) for e in range(plan.num_local_experts)]
            assert counts == wanted
            assert out.shape == (tokens[rank], plan.model.hidden)
            errors = row_errors(out, expected(x, route, plan.transport.wire))
            assert (errors <= PARTIAL_SUM).all(), errors
            if tokens[rank]:
                assert (out[0] == 0).all(), "a token without experts is exactly zero"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("worst_case", ["true", "false"])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_rows_come_back_weighted_and_summed(wire: str, worst_case: str, size: int) -> None:
    plan = packed_plan(
        "torch_a2a",
        size,
        f"transport.wire={wire}",
        f"transport.worst_case_rows={worst_case}",
    )
    check(plan, TOKENS[size])


@pytest.mark.parametrize("size", [1, 2])
def test_reducing_apart_gives_the_same(size: int) -> None:
    check(packed_plan("torch_a2a", size, "transport.fused_reduce=false"), TOKENS[size])


@pytest.mark.parametrize("alignment", [1, 3, 128])
def test_any_alignment(alignment: int) -> None:
    check(packed_plan("torch_a2a", 2, f"experts.row_alignment={alignment}"), TOKENS[2])


def test_nobody_has_tokens() -> None:
    check(packed_plan("torch_a2a", 2), [0, 0])


def identity(world: World, plan: Plan, ids: list[list[int]], weights: list[list[float]]):
    """x there and back through experts that change nothing."""
    transport = build_transport(plan, world)
    x = torch.randn(len(ids), plan.model.hidden).to(torch.bfloat16)
    route = Route(torch.tensor(ids).view(-1, 2), torch.tensor(weights).view(-1, 2))
    batch = transport.dispatch(x, route).wait()
    rows = torch.where((batch.labels >= 0)[:, None], values(batch), NAN).to(torch.bfloat16)
    out = transport.combine(rows, batch, route).wait()
    return x, out, batch.counts.tolist()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("member", ["torch_a2a"])
def test_weights_are_applied_once(member: str, size: int) -> None:
    plan = packed_plan(member, size, "transport.wire=bf16")
    ids, weights = [[0, 7], [3, 4], [1, 2]], [[0.75, 0.25], [2.0, 2.0], [1.0, 0.5]]
    for x, out, _ in run_ranks(size, identity, plan, ids, weights):
        errors = row_errors(out, x.float() * torch.tensor([[1.0], [4.0], [1.5]]))
        assert (errors <= PARTIAL_SUM).all()


def test_the_weight_of_an_empty_slot_is_never_read() -> None:
    plan = packed_plan("torch_a2a", 2, "transport.wire=bf16")
    ids, weights = [[-1, -1], [5, -1]], [[NAN, NAN], [0.5, NAN]]
    for x, out, _ in run_ranks(2, identity, plan, ids, weights):
        assert (out[0] == 0).all()
        torch.testing.assert_close(out[1], x[1] / 2, rtol=0, atol=0)


def test_every_token_to_one_rank_fits_and_nothing_is_dropped() -> None:
    plan = packed_plan("torch_a2a", 4, "transport.wire=bf16")
    ids, weights = [[0, 1]] * 8, [[0.5, 0.5]] * 8
    results = run_ranks(4, identity, plan, ids, weights)
    assert [counts for _, _, counts in results] == [[32, 32], [0, 0], [0, 0], [0, 0]]
    for x, out, _ in results:
        torch.testing.assert_close(out, x, rtol=0, atol=0)


def one_too_many(world: World, plan: Plan) -> None:
    transport = build_transport(plan, world)
    x = torch.zeros(plan.max_tokens + 1, plan.model.hidden, dtype=torch.bfloat16)
    ids = torch.zeros(x.shape[0], plan.model.top_k, dtype=torch.int64)
    with pytest.raises(UserError, match="9 tokens; transport.max_tokens_per_rank is 8"):
        transport.dispatch(x, Route(ids, torch.ones(ids.shape)))


def test_a_batch_above_the_limit_is_refused_before_it_is_sent() -> None:
    run_ranks(1, one_too_many, packed_plan("torch_a2a", 1))


def wrong_weights(world: World, plan: Plan) -> None:
    transport = build_transport(plan, world)
    ids = torch.zeros(2, plan.model.top_k, dtype=torch.int64)
    transport.dispatch(
        torch.zeros(2, plan.model.hidden, dtype=torch.bfloat16), Route(ids, ids.double())
    )


def test_weights_of_another_type_are_refused() -> None:
    with pytest.raises(RankFailed, match="topk_weights: got torch.float64"):
        run_ranks(1, wrong_weights, packed_plan("torch_a2a", 1))


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_plan_has_room_for_what_packing_can_need(ranks: int, alignment: int) -> None:
    plan = packed_plan("torch_a2a", ranks, f"experts.row_alignment={alignment}").transport
    need = most_packed_rows(plan.received_rows, 2, 8 // ranks, alignment)
    assert plan.received_rows == 8 * ranks
    assert plan.packed_rows == need
    assert plan.packed_rows % alignment == 0


def test_a_worst_case_that_cannot_fit_is_refused() -> None:
    config = small_config(
        "transport.name=deepep_ht",
        "hardware.device=h200",
        "transport.max_tokens_per_rank=40000000",
    )
    with pytest.raises(ConfigError, match=r"memory: 1 rank\(s\) on one h200 need .* GiB of"):
        make_plan(config, small_model(), 2)


def test_members_are_listed() -> None:
    assert set(PACKED_MEMBERS) == {"torch_a2a", "deepep_ht"}


def received_rows(plan: Plan, real: int, device: torch.device) -> Received:
    """``real`` rows with local ids and holes; the tail holds NaN and has no expert."""
    rows, hidden, top_k = plan.transport.received_rows, plan.model.hidden, plan.model.top_k
    x = torch.randn(rows, hidden, device=device).to(torch.bfloat16)
    ids = torch.rand(rows, plan.num_local_experts, device=device).argsort(1)[:, :top_k]
    weights = torch.rand(rows, top_k, device=device)
    hole = torch.rand(rows, top_k, device=device) < 0.3
    hole[real:] = True
    ids, weights = torch.where(hole, -1, ids), torch.where(hole, NAN, weights)
    x[real:] = NAN
    sent = quantize_ref(x) if plan.transport.wire == "fp8" else x
    return Received(sent, ids, weights)


def packed_and_back(
    plan: Plan, ops: object, received: Received, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Valid rows, labels, counts and the weighted sums of rows with an expert."""
    packer = Packer(plan, device)
    packer._ops, packer._reduce = ops, ops.reduce
    batch = packer.pack(received, 4)
    real = batch.labels >= 0
    rows = torch.where(real[:, None], values(batch), NAN).to(torch.bfloat16)
    sums = packer.unpack(rows, batch.handle)
    used = (received.topk_ids >= 0).any(1)
    return values(batch)[real], batch.labels, batch.counts, sums[used]


@pytest.mark.parametrize("real", [0, 1, 7, 16])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_the_kernels_pack_as_plain_torch_does(wire: str, real: int, device: torch.device) -> None:
    plan = packed_plan("torch_a2a", 2, f"transport.wire={wire}")
    received = received_rows(plan, real, device)
    plain = packed_and_back(plan, PLAIN, received, device)
    fast = packed_and_back(plan, KERNELS, received, device)
    for name, one, other in zip(("rows", "labels", "counts"), fast, plain, strict=False):
        assert torch.equal(one, other), name
    # The interpreter truncates where hardware rounds to bfloat16.
    torch.testing.assert_close(fast[3], plain[3], rtol=2**-7, atol=1e-6)
