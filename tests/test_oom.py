"""Want of memory, from whichever library: what was asked, what is free, what to lower, exit 7."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epdecode import world
from epdecode.config.load import load_config, load_model
from epdecode.errors import Exit, OutOfMemory
from epdecode.oom import GIB, check_free, explained
from epdecode.plan import Plan, make_plan

ROOT = Path(__file__).resolve().parent.parent
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.23 GiB is free. Process 4711 has 130.55 GiB memory in use. Including non-PyTorch "
    "memory, this process has 7.90 GiB memory in use. Of the allocated memory 7.00 GiB is "
    "allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = load_config("deepseek_v3-h200-ep8_share", [])
    return make_plan(config, load_model(config.model), 1)


@pytest.fixture
def device(monkeypatch):
    """A device of 140 GiB; call it with the GiB that are free."""

    def has(free: float) -> None:
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device=None: (int(free * GIB), 140 * GIB)
        )

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 7 * GIB)
    has(1.23)
    return has


def told(plan: Plan, error: BaseException, on: torch.device = CUDA) -> str:
    with pytest.raises(OutOfMemory) as caught, explained("loading", plan, on):
        raise error
    assert caught.value.exit_code == Exit.OUT_OF_MEMORY == 7
    return str(caught.value)


def test_what_was_asked_what_is_free_and_what_to_lower(plan, device) -> None:
    message = told(plan, torch.OutOfMemoryError(TORCH))
    assert message.startswith("out of memory while loading: asked for 2.00 GiB; 1.23 of 140.00 GiB")
    assert "7.00 GiB held by this rank's torch, 130.55 GiB by process 4711" in message
    assert "weights 8.13, transport_buffer 2.98" in message
    assert message.endswith(
        "Lower layers or transport.max_tokens_per_rank, or put fewer ranks on the GPU"
    )


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be reported later",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Failed: CUDA error /deep_ep/csrc/deep_ep.cpp:104 'out of memory'",
    ],
)
def test_of_libraries_that_raise_a_plain_error(plan, device, text) -> None:
    assert text.splitlines()[0] in told(plan, RuntimeError(text))


def test_behind_the_error_of_a_broken_capture(plan, device) -> None:
    def broken() -> None:
        try:
            raise torch.OutOfMemoryError(TORCH)
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error in capture")

    with pytest.raises(RuntimeError) as caught:
        broken()
    assert "asked for 2.00 GiB" in told(plan, caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError(HOST), MemoryError(), OSError(12, "Cannot allocate memory")]
)
def test_of_the_host(plan, device, error) -> None:
    message = told(plan, error)
    assert "GiB free on the host" in message
    assert "on the device" not in message


def test_asked_of_the_host(plan) -> None:
    assert "asked for 400000000000 bytes" in told(plan, RuntimeError(HOST), CPU)


def test_a_device_in_disorder_does_not_hide_why(plan, device, monkeypatch) -> None:
    def broken(device: object = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert "asked for 2.00 GiB; what is free" in told(plan, torch.OutOfMemoryError(TORCH))


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(2, "no such file")])
def test_other_errors_pass(plan, error) -> None:
    with pytest.raises(type(error)) as caught, explained("loading", plan, CPU):
        raise error
    assert caught.value is error


def test_too_little_free_is_said_before_anything_is_loaded(plan, device) -> None:
    device(11.2)
    check_free(plan, CUDA)
    check_free(plan, CPU)
    device(11.0)
    with pytest.raises(OutOfMemory, match=r"before loading: .* take 11\.11 GiB; 11\.00 of 140\.00"):
        check_free(plan, CUDA)


def test_no_room_for_a_context(monkeypatch, caplog) -> None:
    def full(device: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", full)
    monkeypatch.setattr(world.log, "propagate", True)
    for local_rank in (0, 3):
        with pytest.raises(OutOfMemory, match=f"no room for a CUDA context on cuda:{local_rank}"):
            world.choose_device(local_rank, cpu=False)
    # Rank 0's is printed by the job itself, the others' would be lost.
    assert [record.message.count("cuda:3") for record in caplog.records] == [1]


JOB = """
import os, sys, torch
from epdecode import run
WHERE, RANK = sys.argv.pop(1), sys.argv.pop(1)
def short(*arguments, **more):
    if os.environ["RANK"] == RANK:
        raise torch.OutOfMemoryError({text!r})
    return real(*arguments, **more)
real = getattr(run, WHERE)
setattr(run, WHERE, short)
sys.exit(run.main())
"""


@pytest.mark.torchrun
@pytest.mark.parametrize("where", ["build", "measure"])
def test_one_of_two_ranks(tmp_path, where) -> None:
    """The other is told; both leave; status.json has the true code."""
    script = tmp_path / "job.py"
    script.write_text(JOB.format(text=TORCH))
    job = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(script, where, "1", "--config", "configs/cpu-tiny.yaml", "--out", tmp_path / "runs"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    (status,) = (tmp_path / "runs").glob("*/status.json")
    document = json.loads(status.read_text())
    assert (document["exit_code"], document["stopped_by"]) == (7, 0), job.stderr
    cause = document["cause"]
    assert (cause["kind"], cause["rank"]) == ("out_of_memory", 1)
    assert "rank 1: out of memory while" in cause["message"]
    assert "asked for 2.00 GiB" in cause["message"]
    assert job.stderr.count(f"leaving with exit code 7: {cause['message']}") == 2
    assert json.loads(job.stdout.splitlines()[-1])["exit_code"] == 7
