"""Libraries, each imported in a process of its own: assertion, missing symbol or crash alike."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from importlib import metadata

from epdecode.doctor.check import Outcome, fail, ok, warn
from epdecode.doctor.machine import Machine
from epdecode.doctor.wheels import explain_import, remedy, set_for

IMPORT_LIMIT_S = 60.0

# Checks run in threads: the second asker waits for the first one's answer.
_LOCKS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

# Printed last, so that whatever the import itself prints does not matter.
_PROBE = """
import importlib, json, sys
result = {}
try:
    module = importlib.import_module(sys.argv[1])
    result["version"] = str(getattr(module, "__version__", ""))
    result["file"] = str(getattr(module, "__file__", ""))
    if sys.argv[1] == "torch":
        result["cuda"] = module.version.cuda or ""
        result["devices"] = module.cuda.device_count()
        result["nccl"] = ".".join(map(str, module.cuda.nccl.version())) if result["cuda"] else ""
    if sys.argv[1] == "nvshmem.core":
        version = module.get_version()
        result["version"] = version.nvshmem4py_version
        result["library"] = version.libnvshmem_version
except BaseException as error:
    result["error"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(result), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What an import gave. ``error`` is empty on success."""

    version: str = ""
    file: str = ""
    error: str = ""
    cuda: str = ""
    devices: int = 0
    nccl: str = ""
    library: str = ""


def probe(machine: Machine, module: str) -> Probe:
    """Import ``module`` in a fresh process of the machine's Python and environment, once."""
    with _LOCKS[module]:
        return _probe(machine.python, tuple(sorted(machine.env.items())), module)


@functools.lru_cache(maxsize=32)
def _probe(python: str, env: tuple[tuple[str, str], ...], module: str) -> Probe:
    try:
        child = subprocess.run(
            [python, "-c", _PROBE, module],
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=IMPORT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(error=f"no answer in {IMPORT_LIMIT_S:g} s")
    except OSError as error:
        return Probe(error=f"{python} cannot be started: {error}")
    lines = child.stdout.strip().splitlines()
    try:
        return Probe(**json.loads(lines[-1]))
    except (IndexError, TypeError, ValueError):
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        if child.returncode < 0:
            return Probe(error=f"killed by signal {-child.returncode}: {last}")
        return Probe(error=f"exit code {child.returncode}: {last}")


def installed(distribution: str) -> str:
    """Installed version by package metadata, or ''."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def check_python(machine: Machine) -> Outcome:
    """The interpreter itself."""
    version = ".".join(map(str, sys.version_info[:3]))
    if machine.needs_gpu and sys.version_info[:2] != (3, 12):
        return warn(
            f"Python {version}",
            "3.12, for which the GPU wheels of the cuda extra are built",
            "python3.12 -m venv .venv && .venv/bin/pip install -e '.[cuda]'",
        )
    return ok(f"Python {version} at {machine.python}")


def check_torch(machine: Machine) -> Outcome:
    """torch loads and, where a GPU is needed, sees one."""
    found = probe(machine, "torch")
    if found.error:
        return fail(f"import torch: {found.error}", "torch 2.11 or above", "bash scripts/setup.sh")
    if not machine.needs_gpu:
        return ok(f"torch {found.version}")
    if not found.cuda:
        return fail(
            f"torch {found.version} is a CPU build",
            "a CUDA build of torch",
            remedy("2.11"),
        )
    if not found.devices:
        return fail(
            f"torch {found.version} (CUDA {found.cuda}) sees no GPU",
            "a GPU",
            "compare CUDA_VISIBLE_DEVICES, the driver's CUDA version and the container's GPU flag",
        )
    return ok(
        f"torch {found.version}, CUDA {found.cuda}, NCCL {found.nccl}, {found.devices} GPU(s)"
    )


def check_triton(machine: Machine) -> Outcome:
    """Triton: kernels on GPU, interpreter on CPU."""
    found = probe(machine, "triton")
    if found.error:
        return fail(f"import triton: {found.error}", "triton 3.6", "pip install 'triton>=3.6,<3.7'")
    if not found.version.startswith("3.6"):
        return warn(
            f"triton {found.version}",
            "3.6, the version that the kernels are tested with",
            "pip install 'triton>=3.6,<3.7'",
        )
    return ok(f"triton {found.version}")


def check_deep_ep(machine: Machine) -> Outcome:
    """DeepEP loads with the torch that is here."""
    return _extension(machine, "deep_ep", needed=machine.needs_gpu)


def check_deep_gemm(machine: Machine) -> Outcome:
    """DeepGEMM loads: it wants the right torch and a CUDA toolkit."""
    return _extension(machine, "deep_gemm", needed=machine.needs_deep_gemm)


def _extension(machine: Machine, module: str, needed: bool) -> Outcome:
    if not needed:
        return ok("not needed: nothing here asks for it")
    found, torch = probe(machine, module), probe(machine, "torch").version or "(absent)"
    if found.error:
        cause, fix = explain_import(found.error, torch)
        return fail(f"import {module}: {found.error}", f"{module} loads; {cause}", fix)
    return ok(f"{module} {found.version} from {found.file}".replace("  ", " "))


def check_wheel_set(machine: Machine) -> Outcome:
    """A set that has been run together, or at least recorded."""
    if not machine.needs_gpu:
        return ok("not needed: no GPU here and none asked for")
    torch = probe(machine, "torch").version
    wheels = set_for(torch)
    if wheels is None:
        return warn(f"torch {torch or '(absent)'}", "a torch with a known set", remedy(torch))
    wanted = dict(each.split("==") for each in (wheels.deep_ep, wheels.deep_gemm))
    differing = [
        f"{name} {installed(name) or 'absent'}"
        for name, version in wanted.items()
        if installed(name) != version
    ]
    if differing:
        return warn(f"torch {torch}, {', '.join(differing)}", f"{wanted}", remedy(torch))
    return ok(f"torch {torch}, {wheels.deep_ep}, {wheels.deep_gemm}")


def check_nvshmem(machine: Machine) -> Outcome:
    """nvshmem4py and the host library it loads, beside the library that deep_ep was linked with."""
    if not machine.needs_gpu:
        return ok("not needed: no GPU here and none asked for")
    found = probe(machine, "nvshmem.core")
    if found.error:
        return warn(
            f"import nvshmem.core: {found.error}",
            "nvshmem4py, for run.align: nvshmem and doctor --full",
            "pip install nvshmem4py-cu13==0.4.1 cuda-core",
        )
    packaged = installed("nvidia-nvshmem-cu13") or installed("nvidia-nvshmem-cu12")
    release = ".".join(packaged.split(".")[:3])
    if packaged and found.library != release:
        return warn(
            f"NVSHMEM host library {found.library} loaded, package {packaged} installed",
            "one NVSHMEM: host and device code of different versions fail in initialisation",
            "take the other copy off LD_LIBRARY_PATH, or NVSHMEM_HOME out of the environment",
        )
    if _numbers(found.library) < (3, 3, 9):
        return warn(
            f"NVSHMEM {found.library}", "3.3.9 or above", "pip install -U nvidia-nvshmem-cu13"
        )
    return ok(f"nvshmem4py {found.version}, NVSHMEM {found.library}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
