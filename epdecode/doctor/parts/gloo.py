"""The control plane: every rank hears every other, and bytes arrive as they were sent."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from epdecode.doctor.check import Outcome, fail, ok
from epdecode.world import World

BYTES = 1 << 20
FIX = "set GLOO_SOCKET_IFNAME to the interface that the nodes share; see the logs of all ranks"


def check(world: World) -> Outcome:
    """A gather of rank numbers, then 1 MiB around the ring."""
    start = time.perf_counter()
    ranks = [int(part) for part in world.gather(torch.tensor([world.rank]))]
    if ranks != list(range(world.size)):
        return fail(f"gathered ranks {ranks}", f"0 to {world.size - 1} in order", FIX)
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sent, got = ring_block(world.rank), torch.empty(BYTES, dtype=torch.uint8)
    if world.size > 1:
        work = dist.isend(sent, after, group=world.group)
        dist.recv(got, before, group=world.group)
        if work is not None:
            work.wait()
        if not torch.equal(got, ring_block(before)):
            return fail(f"rank {world.rank}: other bytes than rank {before} sent", "the same", FIX)
    return ok(
        f"{world.size} rank(s), gather and ring of 1 MiB: {time.perf_counter() - start:.3f} s"
    )


def ring_block(rank: int) -> torch.Tensor:
    """uint8 [1 MiB] that only this rank sends."""
    return torch.arange(BYTES, dtype=torch.int64).add(rank * 7919).remainder(251).to(torch.uint8)
