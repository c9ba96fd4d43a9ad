"""run.align: who gets a barrier, who does not and why; the same on every rank."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from epdecode import align
from epdecode.errors import EnvironmentFault
from epdecode.world import World
from tests.ranks import run_ranks


class Stream:
    """A stream that is idle, or busy for ever."""

    def __init__(self, name: str, idle: bool = True) -> None:
        self.cuda_stream, self.idle = name, idle

    def query(self) -> bool:
        return self.idle


class FakeCore:
    """nvshmem.core and nvshmem.bindings as far as the alignment calls them."""

    def __init__(self, status: int, started: bool) -> None:
        self.status, self.started, self.calls = status, started, []

    def get_version(self) -> str:
        return "3.4.5"

    def init_status(self) -> int:
        return self.status if self.started else 0

    def barrier_all_on_stream(self, stream: str) -> None:
        self.calls.append(f"barrier on {stream}")

    def start(self, world: World) -> FakeCore:
        assert not self.started, "a second start"
        self.started = True
        self.calls.append("start")
        return self

    def finalize(self) -> None:
        self.calls.append("finalize")


def built(world: World, name: str, status: int = 2, started: bool = False, lame: int = -1):
    """(Align's name and reason, calls of the library); rank ``lame`` has no nvshmem4py."""
    core = FakeCore(status, started)
    package = types.ModuleType("nvshmem")
    package.core = package.bindings = core
    for module, value in {"": package, ".core": core, ".bindings": core}.items():
        sys.modules[f"nvshmem{module}"] = value
    if world.rank == lame:
        sys.modules["nvshmem.core"] = None
    align.start_nvshmem = core.start
    align.prove = lambda barrier: barrier(Stream("trial"))
    on_gpu = World(**{
        **{name: getattr(world, name) for name in World.__slots__},
        "device": torch.device("cuda", world.rank),
    })  # fmt: skip
    torch.cuda.device_count = lambda: world.size
    made = align.build_align(name, on_gpu)
    made.barrier(Stream("stream"))
    made.close()
    return made.name, made.reason, core.calls


def test_started_when_asked_for() -> None:
    calls = ["start", "barrier on trial", "barrier on stream", "finalize"]
    expected = ("nvshmem", "", calls)
    assert run_ranks(2, built, "nvshmem") == [expected] * 2


def test_auto_starts_nothing() -> None:
    for name, reason, calls in run_ranks(2, built, "auto"):
        assert (name, calls) == ("none", [])
        assert "rank 0: the transport has not started NVSHMEM" in reason


@pytest.mark.parametrize("name", ["auto", "nvshmem"])
@pytest.mark.parametrize("status", [2, 4])
def test_what_deep_ep_started_is_left_to_deep_ep(name, status) -> None:
    expected = ("nvshmem", "", ["barrier on trial", "barrier on stream"])
    assert run_ranks(2, built, name, status, True) == [expected] * 2


def test_no_barrier_without_shares_of_mps() -> None:
    for name, reason, calls in run_ranks(2, built, "auto", align.LIMITED_MPG, True):
        assert (name, calls) == ("none", [])
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in reason


def test_one_rank_without_the_library_decides_for_all() -> None:
    results = run_ranks(2, built, "auto", 2, True, 1)
    assert results[0] == results[1]
    assert results[0][0] == "none"
    assert results[0][1].startswith("rank 1: nvshmem4py cannot be loaded")


class Graph:
    """Stands in for a CUDA graph and for its capture."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def replay(self) -> None:
        pass


@pytest.mark.parametrize("idle", [True, False])
def test_a_barrier_is_tried_eager_and_captured_and_may_not_hang(monkeypatch, idle) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main", idle))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    calls = []
    if idle:
        align.prove(calls.append)
        assert len(calls) == 2
    else:
        with pytest.raises(EnvironmentFault, match="did not return in 0.05 s"):
            align.prove(calls.append, limit_s=0.05)
        assert len(calls) == 1


def refused(world: World, name: str) -> str:
    with pytest.raises(EnvironmentFault) as caught:
        built(world, name, align.LIMITED_MPG)
    return str(caught.value)


def test_nvshmem_asked_for_and_impossible_is_refused_on_all_ranks() -> None:
    for message in run_ranks(2, refused, "nvshmem"):
        assert "run.align: got nvshmem, but rank 0" in message
        assert "accepted here: none or auto" in message


def on_cpu(world: World, name: str) -> tuple[str, str]:
    made = align.build_align(name, world)
    return made.name, made.reason


@pytest.mark.parametrize(
    ("size", "name", "reason"),
    [
        (1, "auto", "rank 0: one rank has nobody to wait for"),
        (2, "auto", "rank 0: no CUDA device"),
        (2, "none", "run.align is none"),
    ],
)
def test_none(size, name, reason) -> None:
    assert run_ranks(size, on_cpu, name) == [("none", reason)] * size


def shared(world: World, transport: str, local_size: int, gpus: int) -> str:
    torch.cuda.device_count = lambda: gpus
    here = World(**{
        **{name: getattr(world, name) for name in World.__slots__},
        "device": torch.device("cuda", 0), "local_size": local_size,
    })  # fmt: skip
    return align.why_not(here, transport)


def test_ranks_that_share_a_gpu(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert run_ranks(2, shared, "deepep_ll", 2, 1) == ["2 ranks share 1 GPU(s) without MPS"] * 2


def unasked(world: World, gpus: int) -> str:
    torch.cuda.device_count = lambda: gpus
    return align.why_not_unasked(world)


def test_auto_leaves_shared_gpus_alone() -> None:
    assert run_ranks(2, unasked, 1) == ["ranks share a GPU, so their times are not reported"] * 2


def test_high_throughput_across_nodes() -> None:
    for reason in run_ranks(2, shared, "deepep_ht", 1, 1):
        assert "one NVSHMEM world per NVLink index" in reason
