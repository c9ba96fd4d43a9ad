"""Who this process is, read from the launcher's environment: one table, no torch.

torchrun sets all of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; none
of them means a world of one. Anything between is an error.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from epdecode.errors import EnvironmentFault, nearest

EXAMPLE = "torchrun --nproc-per-node 2 -m epdecode.run --config configs/cpu-tiny.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process of a launch."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False
    """The launcher's agent already serves the store at master_port."""

    @property
    def one_node(self) -> bool:
        """All ranks are on this host."""
        return self.local_world_size == self.world_size


_NUMBERS = {
    "RANK": ("rank", 0),
    "WORLD_SIZE": ("world_size", 1),
    "LOCAL_RANK": ("local_rank", 0),
    "LOCAL_WORLD_SIZE": ("local_world_size", 1),
    "MASTER_PORT": ("master_port", 1),
}
"""Variable -> (field, least value)."""


def read_launch(env: Mapping[str, str]) -> Launch:
    """The launch that ``env`` describes.

    Raises EnvironmentFault for a missing, malformed or contradictory variable.
    """
    present = [name for name in (*_NUMBERS, "MASTER_ADDR") if env.get(name)]
    ranks = [name for name in present if not name.startswith("MASTER")]
    if not ranks:
        if env.get("SLURM_NTASKS", "1") not in ("", "1") and env.get("SLURM_STEP_ID"):
            raise EnvironmentFault(
                f"this is task {env.get('SLURM_PROCID')} of {env['SLURM_NTASKS']} of a Slurm step, "
                f"but RANK is not set: let srun start one torchrun per node (launch/), not tasks"
            )
        return Launch()
    missing = [name for name in (*_NUMBERS, "MASTER_ADDR") if name not in present]
    if missing:
        raise EnvironmentFault(
            f"{', '.join(ranks)} set but {', '.join(missing)} not: start with `{EXAMPLE}`, or "
            f"unset {', '.join(ranks)} for a world of one"
        )
    numbers = {field: _number(env, name, least) for name, (field, least) in _NUMBERS.items()}
    launch = Launch(
        **numbers,
        master_addr=env["MASTER_ADDR"],
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
    )
    _check(launch)
    return launch


def _number(env: Mapping[str, str], name: str, least: int) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = least - 1
    if value < least:
        raise EnvironmentFault(f"{name}={env[name]!r}: accepted: an integer of at least {least}")
    return value


def _check(launch: Launch) -> None:
    if launch.rank >= launch.world_size:
        raise EnvironmentFault(
            f"RANK={launch.rank} with WORLD_SIZE={launch.world_size}: a stale variable of another "
            f"launch? Start with `{EXAMPLE}`"
        )
    if not launch.local_rank < launch.local_world_size <= launch.world_size:
        raise EnvironmentFault(
            f"LOCAL_RANK={launch.local_rank}, LOCAL_WORLD_SIZE={launch.local_world_size}, "
            f"WORLD_SIZE={launch.world_size} contradict each other: start with `{EXAMPLE}`"
        )


def check_network(launch: Launch, env: Mapping[str, str]) -> None:
    """Refuse, before any connection, addresses that other nodes cannot reach.

    Raises EnvironmentFault: unknown GLOO_SOCKET_IFNAME; a loopback master or a host name that
    resolves to loopback when there are several nodes.
    """
    interfaces = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    listed = ", ".join(f"{name} ({', '.join(a) or 'no IPv4'})" for name, a in interfaces.items())
    wanted = env.get("GLOO_SOCKET_IFNAME", "")
    for name in filter(None, wanted.split(",")):
        if name not in interfaces:
            raise EnvironmentFault(
                f"GLOO_SOCKET_IFNAME={name!r} is no interface of {socket.gethostname()}"
                f"{nearest(name, interfaces)}; interfaces: {listed}"
            )
    if launch.one_node:
        return
    if _is_loopback(launch.master_addr):
        raise EnvironmentFault(
            f"MASTER_ADDR={launch.master_addr} is a loopback address, but the launch spans several "
            f"nodes: give the first node's address; interfaces here: {listed}"
        )
    if not wanted and _is_loopback(socket.gethostname()):
        raise EnvironmentFault(
            f"host name {socket.gethostname()!r} resolves to a loopback address, so other nodes "
            f"cannot reach this one: set GLOO_SOCKET_IFNAME to one of: {listed}"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False
