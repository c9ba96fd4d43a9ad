"""NVSHMEM through nvshmem4py: start, symmetric memory, a peer's memory, a barrier on the stream."""

from __future__ import annotations

import time
from typing import Any

import torch

from epdecode.align import no_barrier, start_nvshmem
from epdecode.doctor.check import Outcome, fail, ok
from epdecode.world import World

WORDS = 1 << 16
BARRIERS = 32


def check(world: World) -> Outcome:
    """Read a peer's symmetric tensor; then barriers, eager and in a captured graph."""
    core = start_nvshmem(world)
    stream = torch.cuda.current_stream()
    mine = core.tensor((WORDS,), dtype=torch.int32)
    mine.fill_(world.rank)
    torch.cuda.synchronize()
    world.barrier()
    peer = (world.rank + 1) % world.size
    got = _read(core, mine, peer, stream)
    world.barrier()
    core.free_tensor(mine)
    if not torch.equal(got, torch.full_like(got, peer)):
        return fail(
            f"rank {world.rank} read {sorted(set(got.tolist()))[:4]} from rank {peer}",
            f"{peer} everywhere",
            "another symptom of a broken link: run full.bandwidth and see `dmesg` for Xid errors",
        )
    if reason := no_barrier(core):
        return ok(f"peer read right; no barrier on the stream: {reason}")
    eager, captured = _barriers(core, stream)
    core.finalize()
    return ok(f"peer read right; barrier {eager:.1f} us eager, {captured:.1f} us in a graph")


def _read(core: Any, mine: torch.Tensor, peer: int, stream: torch.cuda.Stream) -> torch.Tensor:
    """A copy of the peer's tensor: over NVLink where it is mapped, else by a get."""
    got = core.tensor((WORDS,), dtype=torch.int32)
    core.get(got, mine, remote_pe=peer, stream=core.NvshmemStream(stream))
    torch.cuda.synchronize()
    copy: torch.Tensor = got.clone()
    core.free_tensor(got)
    return copy


def _barriers(core: Any, stream: torch.cuda.Stream) -> tuple[float, float]:
    """Microseconds a barrier, issued one by one and replayed from one graph."""

    def all_of_them(on: torch.cuda.Stream) -> None:
        for _ in range(BARRIERS):
            core.barrier_all(core.NvshmemStream(on))

    all_of_them(stream)
    torch.cuda.synchronize()
    eager = _seconds(lambda: all_of_them(stream))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them(torch.cuda.current_stream())
    graph.replay()
    torch.cuda.synchronize()
    return eager / BARRIERS * 1e6, _seconds(graph.replay) / BARRIERS * 1e6


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start
