"""Many ranks cheaply: forkserver processes that meet through a file, no port and no torchrun."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from epdecode import world as worlds
from epdecode.launch.env import Launch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "epdecode.build", "tests.small"])


class RankFailed(Exception):
    """A rank raised; the message is its traceback."""


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, cuda: bool = False, timeout: float = 90
) -> list[Any]:
    """``function(world, *args)`` on every rank; their results in rank order.

    Raises RankFailed with the first failing rank's traceback, or for ranks that did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(size):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(rank, size, path, cuda, there, function, args), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"rank(s) {sorted(waiting.values())} not done in {timeout} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, value = False, "died without a word"
            if not ok:
                raise RankFailed(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int,
    size: int,
    path: str,
    cuda: bool,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        device = worlds.choose_device(rank, cpu=not cuda)
        launch = Launch(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
        world = worlds.join(launch, dist.FileStore(path, size), device, 60)
        try:
            _send(pipe, True, function(world, *args))
        finally:
            worlds.leave()
    except BaseException:  # noqa: BLE001 - whatever it was, the parent raises it
        _send(pipe, False, traceback.format_exc())


def _send(pipe: Connection, ok: bool, value: Any) -> None:
    """Plain pickle: multiprocessing's own would share tensors with a process that then ends."""
    pipe.send_bytes(pickle.dumps((ok, value)))
