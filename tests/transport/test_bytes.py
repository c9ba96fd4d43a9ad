"""What gloo cannot say in its own types travels as bytes, bit for bit."""

from __future__ import annotations

import torch

from epdecode.batch import Fp8Rows, Route
from epdecode.plan import Plan
from epdecode.transport import build_transport
from epdecode.verify import _gather_rows
from epdecode.world import World
from tests.ranks import run_ranks
from tests.small import plain_router, small_model, small_plan

NAN_PATTERNS = [0x7FC1, 0xFFC2, 0x7F81, 0x0001, 0x8000]
"""bfloat16: quiet and signalling NaNs with payloads, a subnormal, minus zero."""


def patterns(count: int) -> torch.Tensor:
    bits = torch.tensor(NAN_PATTERNS, dtype=torch.int32).repeat(256)[: 256 * count]
    return bits.to(torch.int16).view(torch.bfloat16).view(count, 256)


def uneven(world: World, plan: Plan) -> list[torch.Tensor]:
    """Rank r sends r rows to expert 0 and none elsewhere; what expert 0 holds, as bits."""
    transport = build_transport(plan, world)
    x = patterns(world.rank) if world.rank else torch.zeros(0, 256, dtype=torch.bfloat16)
    ids = torch.tensor([[0, -1]]).repeat(world.rank, 1)
    batch = transport.dispatch(x, Route(ids, torch.ones(ids.shape))).wait()
    rows = batch.rows
    assert isinstance(rows, torch.Tensor)
    held = rows[0, : int(batch.counts[0])].clone()
    out = transport.combine(rows, batch, Route(ids, torch.ones(ids.shape))).wait()
    return [held.view(torch.int16), torch.tensor(out.shape)]


def test_nan_payloads_and_uneven_splits_over_three_ranks() -> None:
    model = small_model(num_experts=6, router=plain_router())
    held = run_ranks(3, uneven, small_plan(3, "transport.wire=bf16", model=model))
    sent = torch.cat([patterns(1), patterns(2)]).view(torch.int16)
    assert torch.equal(held[0][0], sent), "by source rank, every bit"
    assert [len(rows) for rows, _ in held] == [3, 0, 0]
    assert [shape.tolist() for _, shape in held] == [[0, 256], [1, 256], [2, 256]]


def gathered(world: World) -> list[torch.Tensor]:
    parts = [
        patterns(2),
        torch.full((2, 4), world.rank, dtype=torch.int32),
        torch.tensor([[1.5], [torch.nan]]),
        torch.randn(2, 128).to(torch.float8_e4m3fn),
    ]
    return [_gather_rows(part, world).view(torch.uint8) for part in parts]


def test_every_dtype_is_gathered_bit_for_bit() -> None:
    first, *others = run_ranks(3, gathered)
    assert torch.equal(first[0], patterns(2).repeat(3, 1).view(torch.uint8))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first[:3], other[:3], strict=True))


def strided(world: World, plan: Plan) -> bool:
    """A view into wider rows gives the same output as its copy."""
    transport = build_transport(plan, world)
    wide = torch.randn(4, 512).to(torch.bfloat16)
    x = wide[:, 64 : 64 + 256]
    ids = torch.tensor([[0, 5]]).repeat(4, 1)
    route = Route(ids, torch.full(ids.shape, 0.5))
    outs = []
    for rows in (x, x.contiguous()):
        batch = transport.dispatch(rows, route).wait()
        assert isinstance(batch.rows, Fp8Rows)
        sent = batch.rows.data.to(torch.float32).to(torch.bfloat16)
        outs.append(transport.combine(sent, batch, route).wait().clone())
    return torch.equal(*outs)


def test_strided_rows_are_taken_as_they_are_meant() -> None:
    assert run_ranks(1, strided, small_plan(1)) == [True]
