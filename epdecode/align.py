"""Lines the ranks up on the GPU before a timed region: an NVSHMEM barrier on the stream.

Without it a stage's time holds both the wait for a late peer and the moving of bytes; behind a
barrier that is captured in front of the region, only the bytes are left.

One NVSHMEM serves the process: nvshmem4py and DeepEP load the same library and must start it over
the same ranks and environment. So this is built after the transport, and ``close`` ends only what
was started here.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from epdecode.errors import EnvironmentFault
from epdecode.world import World

LIMITED_MPG = 3
"""nvshmem_init_status_t: processes share a GPU without MPS; barriers then end the process."""
STARTED = (2, LIMITED_MPG, 4)
"""nvshmem_init_status_t: initialised; with a GPU shared without, or with, MPS."""
PROOF_S = 20.0


@dataclass(frozen=True, slots=True)
class Align:
    """``name``: what it is, nvshmem or none; ``reason``: why none, else empty."""

    name: str
    reason: str
    barrier: Callable[[torch.cuda.Stream], None]
    close: Callable[[], None]


def build_align(name: str, world: World, transport: str = "deepep_ll") -> Align:
    """The alignment that ``run.align`` asks for: auto, nvshmem or none. Collective.

    ``auto`` is nvshmem where each rank has a GPU and the transport has started NVSHMEM, and none
    elsewhere, with the reason. Raises EnvironmentFault on all ranks when ``nvshmem`` is asked for
    and any rank cannot have it.
    """
    if name == "none":
        return _none("run.align is none")
    mine = why_not(world, transport)
    if name == "auto":
        mine = mine or why_not_unasked(world)
    refusal = _first(world, mine)
    if not refusal:
        core = importlib.import_module("nvshmem.core")
        joined = _is_started(core)
        if not joined:
            start_nvshmem(world)
        finalize = _nothing if joined else core.finalize
        refusal = _first(world, no_barrier(core))
        if not refusal:
            prove(_barrier)
            return Align("nvshmem", "", _barrier, finalize)
        finalize()
    if name == "nvshmem":
        raise EnvironmentFault(
            f"run.align: got nvshmem, but {refusal}; accepted here: none or auto"
        )
    return _none(refusal)


def _first(world: World, reason: str) -> str:
    """The first rank's reason, the same text on all ranks; '' when no rank has one."""
    reasons = enumerate(world.gather_text(reason))
    return next((f"rank {rank}: {each}" for rank, each in reasons if each), "")


def why_not(world: World, transport: str) -> str:
    """Why this rank cannot have an NVSHMEM barrier; '' when it can."""
    if world.size == 1:
        return "one rank has nobody to wait for"
    if world.device.type != "cuda":
        return "no CUDA device"
    if world.local_size > torch.cuda.device_count() and not mps_running():
        return f"{world.local_size} ranks share {torch.cuda.device_count()} GPU(s) without MPS"
    if transport == "deepep_ht" and world.size > world.local_size:
        return "deepep_ht across nodes starts one NVSHMEM world per NVLink index, not one for all"
    try:
        importlib.import_module("nvshmem.core")
    except (ImportError, OSError, RuntimeError) as error:
        return f"nvshmem4py cannot be loaded: {type(error).__name__}: {error}"
    return ""


def why_not_unasked(world: World) -> str:
    """Why this rank has none unless it is asked for by name; '' when it has."""
    if world.local_size > torch.cuda.device_count():
        return "ranks share a GPU, so their times are not reported"
    if _is_started(importlib.import_module("nvshmem.core")):
        return ""
    return "the transport has not started NVSHMEM; run.align: nvshmem would, for GiB of memory"


def mps_running() -> bool:
    """An MPS control daemon serves this process's pipe directory."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(pipes, "control").exists()


def start_nvshmem(world: World) -> Any:
    """nvshmem.core, started over all ranks of ``world``. Collective; once in a process."""
    # Multicast over NVSwitch is nothing that DeepEP or a barrier needs, and DeepEP turns it off.
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    core = importlib.import_module("nvshmem.core")
    device = importlib.import_module("cuda.core").Device(world.device.index)
    device.set_current()
    uid = core.get_unique_id(empty=world.rank != 0)
    dist.broadcast(torch.from_numpy(uid._data.view("uint8")), src=0, group=world.group)
    core.init(device=device, uid=uid, rank=world.rank, nranks=world.size, initializer_method="uid")
    return core


def no_barrier(core: Any) -> str:
    """Why a started NVSHMEM must not be asked for a barrier; '' when it may.

    Ranks that share a GPU need MPS, and shares of it (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE) that are
    100 together at most; NVSHMEM ends the process otherwise.
    """
    if int(core.init_status()) != LIMITED_MPG:
        return ""
    return (
        "ranks share a GPU without MPS shares of their own (launch/shared_gpu.sh --mps sets "
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE)"
    )


def prove(barrier: Callable[[torch.cuda.Stream], None], limit_s: float = PROOF_S) -> None:
    """Call the barrier as it will be used: once as it is, once from a captured graph.

    The first call loads the library's kernels, which must not happen inside a capture. Raises
    EnvironmentFault when one does not return: better here than in the timed steps.
    """
    stream = torch.cuda.current_stream()
    barrier(stream)
    _await(stream, limit_s)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        barrier(torch.cuda.current_stream())
    graph.replay()
    _await(stream, limit_s)


def _await(stream: torch.cuda.Stream, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not stream.query():
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"an NVSHMEM barrier of all ranks did not return in {limit_s:g} s; set run.align: "
                f"none, and see `epdecode doctor --full`"
            )
        time.sleep(0.001)


def _barrier(stream: torch.cuda.Stream) -> None:
    # The binding itself, not nvshmem.core: that one insists on a start of its own.
    importlib.import_module("nvshmem.bindings").barrier_all_on_stream(stream.cuda_stream)


def _is_started(core: Any) -> bool:
    """Somebody, that is DeepEP, has started NVSHMEM in this process."""
    core.get_version()  # loads the library
    return int(core.init_status()) in STARTED


def _none(reason: str) -> Align:
    return Align("none", reason, lambda stream: None, _nothing)


def _nothing() -> None:
    """Nothing to end."""
