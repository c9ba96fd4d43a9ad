"""What the tests of packed transports share: plans, gains per expert, round trips."""

from __future__ import annotations

import torch

from epdecode.batch import Fp8Rows, PackedBatch, Route
from epdecode.kernels.fp8 import dequantize
from epdecode.plan import Plan
from epdecode.transport import build_transport
from epdecode.world import World
from tests.fakes import deep_ep_ht
from tests.small import plain_router, small_model, small_plan
from tests.transport.test_contract import gain, inputs

NAN = float("nan")


def packed_plan(member: str, size: int, *overrides: str) -> Plan:
    """Eight experts, top-2, hidden 512, at most eight tokens a rank."""
    return small_plan(
        size,
        f"transport.name={member}",
        "transport.layout=packed",
        "experts.name=torch_loop",
        "transport.max_tokens_per_rank=8",
        "batch.tokens_per_rank=8",
        "batch.buckets=[1,2,4,8]",
        *overrides,
        model=small_model(hidden=512, num_shared_experts=0, router=plain_router()),
    )


def values(batch: PackedBatch) -> torch.Tensor:
    """float32 [R, H], whichever way the rows are held."""
    return dequantize(batch.rows) if isinstance(batch.rows, Fp8Rows) else batch.rows.float()


def check_blocks(batch: PackedBatch, alignment: int) -> None:
    """Labels, counts and block starts say the same; labels select no gap."""
    labels, start = batch.labels.tolist(), 0
    for expert, count in enumerate(batch.counts.tolist()):
        assert labels[start : start + count] == [expert] * count
        end = -(-(start + count) // alignment) * alignment
        assert labels[start + count : end] == [-1] * (end - start - count)
        start = end
    assert labels[start:] == [-1] * (len(labels) - start)


def apply_gains(batch: PackedBatch, rank: int) -> torch.Tensor:
    """Each row times its expert's power of two; every other row NaN."""
    factor = torch.tensor([gain(rank * len(batch.counts) + e) for e in range(len(batch.counts))])
    real = (batch.labels >= 0).cpu()
    rows = values(batch).cpu()
    out = torch.full(rows.shape, NAN)
    out[real] = rows[real] * factor[batch.labels.cpu()[real].long()][:, None]
    return out.to(torch.bfloat16).to(batch.labels.device)


def round_trips(
    world: World, plan: Plan, tokens: list[int], steps: int, fake: bool = False
) -> list[tuple[torch.Tensor, list[int]]]:
    """Each step's combined output and counts on this rank."""
    if fake:
        deep_ep_ht.install()
    transport = build_transport(plan, world)
    done = []
    for step in range(steps):
        x, route = inputs(plan, tokens, step)[world.rank]
        x = x.to(world.device)
        route = Route(route.topk_ids.to(world.device), route.topk_weights.to(world.device))
        batch = transport.dispatch(x, route).wait()
        assert isinstance(batch, PackedBatch)
        check_blocks(batch, plan.transport.row_alignment)
        out = transport.combine(apply_gains(batch, world.rank), batch, route).wait()
        done.append((out.cpu().clone(), batch.counts.tolist()))
    transport.close()
    return done
