"""The doctor on libraries, GPUs and compilers: each planted fault FAILs its own row, with a fix."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from epdecode.config.load import load_config
from epdecode.doctor import gpu, libraries
from epdecode.doctor.check import Verdict
from epdecode.doctor.nvml import Gpus
from epdecode.doctor.table import CHECKS
from epdecode.doctor.wheels import WHEEL_SETS, explain_import, set_for
from tests.machines import TORCH, gpus, machine, one_gpu, stub

ROOT = Path(__file__).resolve().parent.parent

# Libraries (O19): absent, wrong ABI, assertion, missing shared object, crash.


@pytest.mark.parametrize("module", ["deep_ep", "deep_gemm"])
@pytest.mark.parametrize(
    ("text", "saw", "fix"),
    [
        ("raise ImportError('x.so: undefined symbol: _ZN3c104cuda9SetDeviceEa')",
         "undefined symbol", "tokenspeed-deepep==1.2.1.post20251110"),
        ("assert None is not None", "AssertionError", "CUDA_HOME"),
        ("raise OSError('libnvshmem_host.so.3: cannot open shared object file')",
         "libnvshmem_host.so.3", "LD_LIBRARY_PATH"),
        ("raise OSError('libcudart.so.12: cannot open shared object file')",
         "libcudart.so.12", "tokenspeed-deepgemm"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
         f"killed by signal {int(signal.SIGSEGV)}", "tokenspeed-deepep"),
        ("import sys; sys.exit(4)", "SystemExit", "tokenspeed-deepep"),
        ("print('noise')\n__version__ = ''\nraise RuntimeError('odd')", "odd", "tokenspeed-deepep"),
    ],
)  # fmt: skip
def test_a_library_that_does_not_load(tmp_path, module, text, saw, fix) -> None:
    env = stub(tmp_path, torch=TORCH, **{module: text})
    outcome = CHECKS[module](machine(env=env))
    assert outcome.verdict is Verdict.FAIL
    assert saw in outcome.saw
    assert fix in outcome.fix


def test_a_library_that_is_not_there(tmp_path) -> None:
    outcome = libraries.check_deep_ep(machine(env=stub(tmp_path, torch=TORCH)))
    assert outcome.verdict is Verdict.FAIL
    assert "No module named 'deep_ep'" in outcome.saw
    assert WHEEL_SETS[0].deep_ep in outcome.fix


def test_a_library_that_loads(tmp_path) -> None:
    env = stub(tmp_path, torch=TORCH, deep_ep="print('noise')\n__version__ = '1.2.1'")
    outcome = libraries.check_deep_ep(machine(env=env))
    assert (outcome.verdict, "deep_ep 1.2.1" in outcome.saw) == (Verdict.OK, True)


def test_nothing_of_the_gpu_is_asked_of_gloo() -> None:
    """transport=torch_a2a works without any of it."""
    here = machine(config=load_config("cpu-tiny"), gpus=Gpus(reason="no driver"))
    for name in ("deep_ep", "deep_gemm", "wheel_set", "nvshmem", "gpu", "compiler", "jit_cache"):
        assert CHECKS[name](here).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("torch", "verdict"),
    [
        (TORCH, Verdict.OK),
        (TORCH.replace('"13.0"', "None"), Verdict.FAIL),
        (TORCH.replace("lambda: 1)", "lambda: 0)", 1), Verdict.FAIL),
        ("raise ImportError('libtorch_cuda.so')", Verdict.FAIL),
    ],
    ids=["good", "CPU build", "sees no GPU", "broken"],
)
def test_torch(tmp_path, torch, verdict) -> None:
    outcome = libraries.check_torch(machine(env=stub(tmp_path, torch=torch)))
    assert outcome.verdict is verdict, outcome
    assert bool(outcome.fix) == (verdict is not Verdict.OK)


@pytest.mark.parametrize(
    ("version", "deep_ep"),
    [
        ("2.11.0+cu130", "tokenspeed-deepep==1.2.1.post20251110"),
        ("2.12.1", "tokenspeed-deepep==1.2.1.post20251110"),
        ("2.13.0+cpu", "sgl-deep-ep==0.1.0"),
        ("2.14.1", "sgl-deep-ep==0.1.2.post1"),
    ],
)
def test_wheel_set_of_a_torch(version, deep_ep) -> None:
    assert set_for(version).deep_ep == deep_ep
    assert deep_ep in explain_import("undefined symbol: x", version)[1]


def test_no_wheel_set_of_an_old_torch() -> None:
    assert set_for("2.4.0") is None
    cause, fix = explain_import("ImportError: undefined symbol: x", "2.4.0")
    assert "ABI" in cause
    assert "no wheel set is known for torch 2.4.0" in fix


def test_wheel_sets_are_those_that_are_documented_and_pinned() -> None:
    text = (ROOT / "docs/dependencies.md").read_text()
    for wheels in WHEEL_SETS:
        for requirement in (wheels.deep_ep, wheels.deep_gemm):
            name, version = requirement.split("==")
            assert name in text
            assert version in text
    for requirement in (WHEEL_SETS[0].deep_ep, WHEEL_SETS[0].deep_gemm):
        for file in ("pyproject.toml", "scripts/offline_gpu.sh"):
            assert requirement in (ROOT / file).read_text()


# GPU, links, compiler.


@pytest.mark.parametrize(
    ("capability", "verdict"),
    [((9, 0), Verdict.OK), ((10, 0), Verdict.OK), ((8, 0), Verdict.FAIL), ((12, 1), Verdict.FAIL)],
)
def test_capability(capability, verdict) -> None:
    outcome = gpu.check_capability(machine(gpus=gpus(one_gpu(capability=capability))))
    assert outcome.verdict is verdict
    if verdict is Verdict.FAIL:
        assert f"{capability[0]}.{capability[1]}" in outcome.saw
        assert "9.0" in outcome.want


def test_no_driver() -> None:
    outcome = gpu.check_gpu(machine(gpus=Gpus(reason="no NVIDIA driver answers: not found")))
    assert (outcome.verdict, outcome.saw) == (
        Verdict.FAIL,
        "no NVIDIA driver answers: not found",
    )


def test_driver_too_old_for_torch(tmp_path) -> None:
    env = stub(tmp_path, torch=TORCH)
    outcome = gpu.check_gpu(machine(env=env, gpus=replace(gpus(), cuda=(12, 4))))
    assert outcome.verdict is Verdict.FAIL
    assert "CUDA up to 12.4, torch wants 13.0" in outcome.saw


@pytest.mark.parametrize(
    ("links", "verdict"),
    [((18, 18), Verdict.OK), ((18, 17), Verdict.WARN), ((0, 0), Verdict.FAIL), ((0,), Verdict.OK)],
)
def test_nvlink(links, verdict) -> None:
    devices = (one_gpu(index, nvlinks=count) for index, count in enumerate(links))
    assert gpu.check_nvlink(machine(gpus=gpus(*devices))).verdict is verdict


def nvcc(folder: Path, text: str) -> Path:
    program = folder / "bin/nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return folder


def test_compiler_absent(tmp_path) -> None:
    outcome = gpu.check_compiler(machine(tmp_path, env={"PATH": str(tmp_path)}))
    assert outcome.verdict is Verdict.FAIL
    assert "CUDA_HOME is (unset)" in outcome.saw
    assert "CUDA_HOME" in outcome.fix


def test_compiler_of_a_wrong_home_is_not_looked_for_elsewhere(tmp_path) -> None:
    home = nvcc(tmp_path / "cuda", "echo 'release 13.0, V13'")
    env = {"PATH": str(home / "bin"), "CUDA_HOME": str(tmp_path / "nope")}
    assert gpu.check_compiler(machine(env=env)).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("text", "capability", "verdict"),
    [
        ("echo 'Cuda compilation tools, release 12.3, V12.3.52'", (9, 0), Verdict.OK),
        ("echo 'Cuda compilation tools, release 12.2, V12.2.1'", (9, 0), Verdict.FAIL),
        ("echo 'Cuda compilation tools, release 12.4, V12.4.1'", (10, 0), Verdict.FAIL),
        ("exit 1", (9, 0), Verdict.FAIL),
    ],
)
def test_compiler_version(tmp_path, text, capability, verdict) -> None:
    env = {"PATH": "/usr/bin:/bin", "CUDA_HOME": str(nvcc(tmp_path, text))}
    here = machine(env=env, gpus=gpus(one_gpu(capability=capability)))
    assert gpu.check_compiler(here).verdict is verdict
