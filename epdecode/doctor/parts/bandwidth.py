"""Bytes per second from every rank to every other, all ranks sending at once in N-1 rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from epdecode.align import start_nvshmem
from epdecode.doctor.check import Outcome, ok, warn
from epdecode.world import World

CPU_BYTES = 4 << 20
GPU_BYTES = 256 << 20
REPEATS = 3
SLOW = 0.5
"""A pair below this share of the median is worth a look."""

Move = Callable[[int, int], None]
"""(rank to read from, rank that reads from me): returns when this rank's bytes are here."""


def check(world: World) -> Outcome:
    """Over NVLink or RDMA where each rank has a GPU of its own, else over gloo on the CPU."""
    if world.size == 1:
        return ok("one rank has no peer")
    if world.device.type != "cuda":
        return judge(measure(world, _gloo_move(world), CPU_BYTES), "gloo")
    if world.local_size > torch.cuda.device_count():
        return ok("not measured: ranks share a GPU")
    core = start_nvshmem(world)
    source = core.tensor((GPU_BYTES,), dtype=torch.uint8)
    target = core.tensor((GPU_BYTES,), dtype=torch.uint8)
    stream = torch.cuda.current_stream()

    def move(peer: int, reader: int) -> None:
        core.get(target, source, remote_pe=peer, stream=core.NvshmemStream(stream))
        torch.cuda.synchronize()

    matrix = measure(world, move, GPU_BYTES)
    core.free_tensor(source)
    core.free_tensor(target)
    core.finalize()
    return judge(matrix, "NVSHMEM get")


def measure(world: World, move: Move, size: int) -> list[list[float]]:
    """GB/s [reader][source]; 0 on the diagonal. Same on all ranks."""
    row = [0.0] * world.size
    for shift in range(1, world.size):
        peer, reader = (world.rank + shift) % world.size, (world.rank - shift) % world.size
        best = float("inf")
        for _ in range(REPEATS):
            world.barrier()
            start = time.perf_counter()
            move(peer, reader)
            best = min(best, time.perf_counter() - start)
        row[peer] = size / best / 1e9
    return [part.tolist() for part in world.gather(torch.tensor(row))]


def _gloo_move(world: World) -> Move:
    sent = torch.zeros(CPU_BYTES, dtype=torch.uint8)
    got = torch.empty_like(sent)

    def move(peer: int, reader: int) -> None:
        work = dist.isend(sent, reader, group=world.group)
        dist.recv(got, peer, group=world.group)
        if work is not None:
            work.wait()

    return move


def judge(matrix: list[list[float]], over: str) -> Outcome:
    """WARN when one pair is far below the median; the matrix itself for up to 8 ranks."""
    pairs = {
        (reader, source): speed
        for reader, row in enumerate(matrix)
        for source, speed in enumerate(row)
        if reader != source
    }
    slowest = min(pairs, key=lambda pair: pairs[pair])
    median = statistics.median(pairs.values())
    saw = (
        f"{over}: {min(pairs.values()):.2f} to {max(pairs.values()):.2f} GB/s, median {median:.2f}"
    )
    if len(matrix) <= 8:
        saw += "".join("\n" + " ".join(f"{speed:7.2f}" for speed in row) for row in matrix)
    if pairs[slowest] < SLOW * median:
        return warn(
            saw,
            f"rank {slowest[0]} reads from {slowest[1]} at {pairs[slowest]:.2f} GB/s: at least "
            f"{SLOW * median:.2f}",
            "look at that link: `nvidia-smi nvlink -e`, the NIC's port and its PCIe slot",
        )
    return ok(saw)
