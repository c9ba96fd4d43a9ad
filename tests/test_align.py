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


class FirstStream:
    """The stream on which the barrier is called for the first time."""

    def __str__(self) -> str:
        return "first"

    def synchronize(self) -> None:
        pass


class FakeCore:
    """nvshmem.core as far as the alignment calls it."""

    def __init__(self, status: int, started: bool) -> None:
        self.status, self.started, self.calls = status, started, []

    def get_version(self) -> str:
        return "3.4.5"

    def init_status(self) -> int:
        return self.status if self.started else 0

    def barrier_all(self, stream: str) -> None:
        self.calls.append(f"barrier on {stream}")

    def NvshmemStream(self, stream: str) -> str:  # noqa: N802 - the library's name
        return stream

    def finalize(self) -> None:
        self.calls.append("finalize")


def built(world: World, name: str, status: int = 2, started: bool = False, lame: int = -1):
    """(Align's name and reason, calls of the library); rank ``lame`` has no nvshmem4py."""
    core = FakeCore(status, started)
    package = types.ModuleType("nvshmem")
    package.core = core
    sys.modules["nvshmem"], sys.modules["nvshmem.core"] = package, core
    if world.rank == lame:
        sys.modules["nvshmem.core"] = None
    align.start_nvshmem = lambda world: setattr(core, "started", True) or core
    on_gpu = World(**{
        **{name: getattr(world, name) for name in World.__slots__},
        "device": torch.device("cuda", world.rank),
    })  # fmt: skip
    torch.cuda.device_count = lambda: world.size
    torch.cuda.current_stream = lambda: FirstStream()
    made = align.build_align(name, on_gpu)
    made.barrier("stream")
    made.close()
    return made.name, made.reason, core.calls


@pytest.mark.parametrize("name", ["auto", "nvshmem"])
def test_a_gpu_each(name) -> None:
    expected = ("nvshmem", "", ["barrier on first", "barrier on stream", "finalize"])
    assert run_ranks(2, built, name) == [expected] * 2


def test_what_deep_ep_started_is_left_to_deep_ep() -> None:
    expected = ("nvshmem", "", ["barrier on first", "barrier on stream"])
    assert run_ranks(2, built, "auto", 2, True) == [expected] * 2


def test_no_barrier_without_shares_of_mps() -> None:
    for name, reason, calls in run_ranks(2, built, "auto", align.LIMITED_MPG):
        assert (name, calls) == ("none", ["finalize"])
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in reason


def test_one_rank_without_the_library_decides_for_all() -> None:
    results = run_ranks(2, built, "auto", 2, False, 1)
    assert results[0] == results[1]
    assert results[0][0] == "none"
    assert results[0][1].startswith("rank 1: nvshmem4py cannot be loaded")


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


def test_high_throughput_across_nodes() -> None:
    for reason in run_ranks(2, shared, "deepep_ht", 1, 1):
        assert "one NVSHMEM world per NVLink index" in reason
