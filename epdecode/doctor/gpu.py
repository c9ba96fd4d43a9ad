"""GPU, driver, links between GPUs, and the compiler that DeepGEMM calls at run time."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from epdecode.doctor.check import Outcome, fail, ok, warn
from epdecode.doctor.libraries import probe
from epdecode.doctor.machine import Machine

CAPABILITIES = {(9, 0): (12, 3), (10, 0): (12, 9), (10, 3): (12, 9)}
"""Compute capability -> least CUDA toolkit: Hopper and data-centre Blackwell, no others."""

NOT_NEEDED = "not needed: no GPU here and none asked for"


def check_gpu(machine: Machine) -> Outcome:
    """A driver with GPUs, and a CUDA that it can run."""
    gpus = machine.gpus
    if not machine.needs_gpu:
        return ok(f"{NOT_NEEDED} ({gpus.reason or 'no GPU'})")
    if not gpus.devices:
        return fail(
            gpus.reason or "the driver lists no GPU",
            "an NVIDIA GPU and its driver",
            "install the driver, start the container with GPUs (docker --gpus all), or run on CPU: "
            "configs/cpu-tiny.yaml",
        )
    wanted = probe(machine, "torch").cuda
    if wanted and int(wanted.split(".")[0]) > gpus.cuda[0]:
        return fail(
            f"driver {gpus.driver} runs CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}, torch wants "
            f"{wanted}",
            f"a driver for CUDA {wanted.split('.')[0]}",
            "upgrade the driver (580 or above for CUDA 13), or take a torch built for CUDA "
            f"{gpus.cuda[0]}",
        )
    names = sorted({gpu.name for gpu in gpus.devices})
    return ok(f"{len(gpus.devices)} x {', '.join(names)}, driver {gpus.driver}")


def check_capability(machine: Machine) -> Outcome:
    """DeepEP and DeepGEMM are compiled for 9.0 and 10.x only."""
    if not machine.needs_gpu or not machine.gpus.devices:
        return ok(NOT_NEEDED)
    wrong = [
        f"GPU {gpu.index} ({gpu.name}) has {gpu.capability[0]}.{gpu.capability[1]}"
        for gpu in machine.gpus.devices
        if gpu.capability not in CAPABILITIES
    ]
    if wrong:
        accepted = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        return fail(
            "; ".join(wrong),
            f"compute capability {accepted}",
            "leave the GPU out with CUDA_VISIBLE_DEVICES, or run with transport.name: torch_a2a",
        )
    found = sorted({gpu.capability for gpu in machine.gpus.devices})
    return ok(", ".join(f"{major}.{minor}" for major, minor in found))


def check_nvlink(machine: Machine) -> Outcome:
    """DeepEP wants NVLink between the GPUs of a node; over PCIe it takes 2 ranks at most."""
    devices = machine.gpus.devices
    if not machine.needs_gpu or len(devices) < 2:
        return ok("not needed: fewer than 2 GPUs")
    links = [gpu.nvlinks for gpu in devices]
    if min(links) == 0:
        return fail(
            f"links up per GPU: {links}",
            "NVLink on every GPU",
            "use at most 2 ranks over PCIe, or see `nvidia-smi nvlink -s` and the fabric manager",
        )
    if min(links) < max(links):
        return warn(
            f"links up per GPU: {links}",
            "the same on every GPU",
            "a link is down: see `nvidia-smi nvlink -s` and the fabric manager",
        )
    return ok(f"{links[0]} links on each of {len(devices)} GPUs")


def check_compiler(machine: Machine) -> Outcome:
    """DeepGEMM compiles its kernels at run time: nvcc of a new enough toolkit, or NVRTC."""
    if not machine.needs_deep_gemm:
        return ok("not needed: nothing here asks for deep_gemm")
    toolkits = [CAPABILITIES.get(gpu.capability, (12, 3)) for gpu in machine.gpus.devices]
    least = max(toolkits, default=(12, 3))
    want = f"nvcc of CUDA {least[0]}.{least[1]} or above"
    nvcc = find_nvcc(machine)
    if nvcc is None:
        where = machine.env.get("CUDA_HOME") or machine.env.get("CUDA_PATH") or "(unset)"
        return fail(
            f"no nvcc: CUDA_HOME is {where}, none on PATH, none in /usr/local/cuda/bin",
            want,
            "install the CUDA toolkit and set CUDA_HOME, or set experts.name: triton_gemm",
        )
    version = nvcc_version(nvcc)
    if version is None:
        return fail(f"{nvcc} --version gives no version", want, "reinstall the CUDA toolkit")
    if version < least:
        return fail(f"nvcc {version[0]}.{version[1]} at {nvcc}", want, "install a newer toolkit")
    nvrtc = " (DG_JIT_USE_NVRTC=1: NVRTC)" if machine.env.get("DG_JIT_USE_NVRTC") == "1" else ""
    return ok(f"nvcc {version[0]}.{version[1]} at {nvcc}{nvrtc}")


def find_nvcc(machine: Machine) -> Path | None:
    """Where DeepGEMM looks: CUDA_HOME or CUDA_PATH if set, else PATH, else /usr/local/cuda."""
    home = machine.env.get("CUDA_HOME") or machine.env.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=machine.env.get("PATH", ""))
    if home:
        candidate = Path(home) / "bin" / "nvcc"
    elif on_path:
        candidate = Path(on_path)
    else:
        candidate = machine.root / "usr/local/cuda/bin/nvcc"
    return candidate if candidate.is_file() else None


def nvcc_version(nvcc: Path) -> tuple[int, int] | None:
    """(major, minor) of the toolkit."""
    try:
        child = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+)\.(\d+)", child.stdout)
    return (int(match[1]), int(match[2])) if match else None
