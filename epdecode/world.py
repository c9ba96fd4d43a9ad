"""The ranks: joining (bounded in time), agreeing before the first collective, leaving."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from epdecode.errors import ConfigError, EnvironmentFault, OutOfMemory, UserError
from epdecode.launch.env import Launch, check_network
from epdecode.oom import find_shortage

LOOPBACK = "127.0.0.1"
log = logging.getLogger("epdecode.world")


@dataclass(frozen=True, slots=True)
class World:
    """This process among its peers. ``group`` is gloo: control plane and CPU data plane."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    group: dist.ProcessGroup
    store: Store

    def barrier(self) -> None:
        """Wait for every rank (host side)."""
        dist.barrier(group=self.group)

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's copy of a CPU tensor of the same shape and dtype."""
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values, group=self.group)
        return parts

    def gather_text(self, text: str) -> list[str]:
        """Every rank's text, as bytes: nothing is pickled."""
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        sizes = [int(part) for part in self.gather(torch.tensor([data.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = self.gather(padded)
        return [
            bytes(part[:size].tolist()).decode().rstrip("\0")
            for part, size in zip(parts, sizes, strict=True)
        ]


def choose_device(local_rank: int, cpu: bool) -> torch.device:
    """CUDA device local_rank modulo the device count, set before anything touches CUDA.

    Raises OutOfMemory when the device is full already.
    """
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
        torch.cuda.set_device(device)
        torch.cuda.mem_get_info(device)  # the context is made here
    except RuntimeError as error:
        if find_shortage(error) is None:
            raise
        message = (
            f"out of memory: no room for a CUDA context on {device}: nvidia-smi says who is there"
        )
        if local_rank:
            # Of errors this early only a node's first rank speaks, and it may have another device.
            log.error(message)
        raise OutOfMemory(message) from error
    return device


def open_store(launch: Launch, timeout_s: float) -> Store:
    """The key-value store of this launch; a world of one keeps its own in memory.

    Without a launcher that serves one rank 0 does: on loopback only when all ranks are on its host.
    """
    if launch.world_size == 1 and not launch.master_addr:
        return HashStore()
    serves = launch.rank == 0 and not launch.agent_store
    here = launch.one_node and not launch.agent_store
    host = LOOPBACK if here else launch.master_addr
    try:
        return TCPStore(
            host,
            launch.master_port,
            launch.world_size,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=_loopback(launch.master_port) if serves and here else None,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise EnvironmentFault(
            f"rank {launch.rank} cannot {'serve' if serves else 'reach'} the store at {host}:"
            f"{launch.master_port} within {timeout_s:g} s: {error}"
        ) from error


def _loopback(port: int) -> int:
    """A bound socket, which the store takes over: left to itself it binds all interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((LOOPBACK, port))
        return made.detach()


def agree(
    store: Store,
    launch: Launch,
    facts: Mapping[str, Mapping[str, str]],
    timeout_s: float,
) -> None:
    """Compare every rank's facts through the store, before the first collective.

    facts: {"config": {...}, "versions": {...}}; every value a short text. Raises on all ranks, with
    the odd rank and the first differing key: ConfigError for config, EnvironmentFault otherwise,
    EnvironmentFault naming the ranks that never came.
    """
    mine = {f"{kind}:{key}": value for kind, part in facts.items() for key, value in part.items()}
    store.set(f"agree/{launch.rank}", json.dumps(mine))
    ranks = _collect(store, launch, timeout_s)
    for key in dict.fromkeys(key for rank in ranks for key in rank):
        values = [rank.get(key, "(absent)") for rank in ranks]
        common = max(values, key=values.count)
        odd = next((rank for rank, value in enumerate(values) if value != common), None)
        if odd is None:
            continue
        kind, _, name = key.partition(":")
        other = values.index(common)
        message = (
            f"ranks disagree on {kind} {name}: rank {odd} has {values[odd]}, rank {other} has "
            f"{common}"
        )
        raise (ConfigError if kind == "config" else EnvironmentFault)(message)


def _collect(store: Store, launch: Launch, timeout_s: float) -> list[dict[str, str]]:
    keys = [f"agree/{rank}" for rank in range(launch.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise EnvironmentFault(
            f"rank(s) {', '.join(absent) or 'unknown'} of {launch.world_size} did not join within "
            f"limits.join_s = {timeout_s:g} s"
        ) from error
    return [json.loads(store.get(key)) for key in keys]


def join(launch: Launch, store: Store, device: torch.device, timeout_s: float) -> World:
    """The only init_process_group: gloo over the store."""
    if launch.one_node:
        # One host needs no other interface, and nobody outside should be able to connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    check_network(launch, os.environ)
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("gloo", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"rank {launch.rank} on {socket.gethostname()} could not join: {error}"
        ) from error
    group = dist.group.WORLD
    if group is None:
        raise UserError("the process group is gone right after it was made")
    return World(
        rank=launch.rank,
        size=launch.world_size,
        local_rank=launch.local_rank,
        local_size=launch.local_world_size,
        device=device,
        group=group,
        store=store,
    )


def leave() -> None:
    """Leave the group, after every transport is closed."""
    if dist.is_initialized():
        dist.destroy_process_group()
