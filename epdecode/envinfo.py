"""``epdecode env``: one block for bug reports. Each probe may fail alone; 3 s at most in all."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from epdecode.commit import commit

LIMIT_S = 3.0
MARGIN_S = 0.2
SCHEMA = "epdecode.env/1"

PACKAGES = (
    "epdecode", "torch", "triton", "numpy", "pydantic", "nvidia-ml-py",
    "tokenspeed-deepep", "sgl-deep-ep", "deep-ep",
    "tokenspeed-deepgemm", "sgl-deep-gemm", "deep-gemm",
    "nvshmem4py-cu13", "nvshmem4py-cu12", "nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12",
    "nvidia-nccl-cu13", "nvidia-nccl-cu12", "cuda-core",
)  # fmt: skip

# Values are shown, so only names that carry no secret: never the whole environment.
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF",
    "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS", "TRITON_CACHE_DIR", "TRITON_INTERPRET",
)  # fmt: skip
PREFIXES = ("NVSHMEM_", "NCCL_", "GLOO_", "DG_", "EP_", "EPDECODE_", "TORCH_NCCL_", "UCX_NET_")
SLURM = (
    "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_NODEID",
    "SLURM_JOB_NODELIST",
)  # fmt: skip

MODULES = ("torch", "triton", "deep_ep", "deep_gemm", "nvshmem.core")
LIBRARIES = ("libnvshmem_host.so", "libnccl.so", "libcudart.so", "libc10.so", "libcuda.so")


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print versions, GPUs, network and relevant variables: the block for a bug report."""
    block = collect()
    typer.echo(json.dumps(block, indent=2) if as_json else render(block))


def collect(limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Every probe's answer; ``"unknown: why"`` for one that failed or was too slow."""
    answers: dict[str, Any] = {}

    def run(name: str, probe: Callable[[], Any]) -> None:
        try:
            answers[name] = probe()
        except Exception as error:  # noqa: BLE001 - one probe's failure is its own line
            answers[name] = f"unknown: {type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in PROBES.items()]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"unknown: no answer in {limit_s:g} s"
    return {"schema": SCHEMA, **{name: answers.get(name, late) for name in PROBES}}


def render(block: Mapping[str, Any]) -> str:
    """Indented ``key: value`` text, fit to paste."""
    lines = []
    for name, value in block.items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key}: {item}" for key, item in value.items()]
        elif isinstance(value, list):
            lines.append(f"{name}:")
            lines += [f"  {item}" for item in value or ["none"]]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def _host() -> dict[str, Any]:
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "python": f"{platform.python_version()} at {sys.executable}",
        "cpus": f"{os.cpu_count()} ({len(psutil.Process().cpu_affinity())} usable)"
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _installed() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def loaded_libraries(maps: str) -> dict[str, str]:
    """Library -> the file mapped into a process, from the text of /proc/<pid>/maps."""
    found = {}
    for line in maps.splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        for name in LIBRARIES:
            if Path(path).name.startswith(name):
                found[name] = path
    return found


# Where a module would come from is known at once; each version when its import is done. A slow
# import costs itself and what follows, not the rest.
_LOAD = """
import importlib, importlib.util, sys
names = [name for name in sys.argv[1:] if importlib.util.find_spec(name.split(".")[0])]
for name in names:
    print(f"?{name} {importlib.util.find_spec(name.split('.')[0]).origin}", flush=True)
for name in names:
    try:
        text = getattr(importlib.import_module(name), "__version__", "no version")
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    print(f"@{name} {' '.join(str(text).split())}", flush=True)
print("@maps", flush=True)
print(open("/proc/self/maps").read())
"""


def _loaded() -> dict[str, str]:
    """Module -> version or error, library -> file: of this process where it is a run's."""
    return _loaded_here() if "torch" in sys.modules else _loaded_elsewhere()


def _loaded_here() -> dict[str, str]:
    versions = {
        name: str(getattr(sys.modules[name], "__version__", "no version"))
        if name in sys.modules
        else "not loaded"
        for name in MODULES
    }
    maps = Path("/proc/self/maps")
    return versions | loaded_libraries(maps.read_text() if maps.exists() else "")


def _loaded_elsewhere() -> dict[str, str]:
    """What an import gives, in a fresh process."""
    limit_s = LIMIT_S - MARGIN_S
    with subprocess.Popen(
        [sys.executable, "-c", _LOAD, *MODULES],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        timer = threading.Timer(limit_s, child.kill)
        timer.start()
        try:
            output, _ = child.communicate()
        finally:
            timer.cancel()
    head, _, maps = output.partition("@maps\n")
    found = dict.fromkeys(MODULES, "not found")
    for line in head.splitlines():
        name, _, text = line[1:].partition(" ")
        if line.startswith("?"):
            found[name] = f"not imported in {limit_s:g} s: {text}"
        elif line.startswith("@"):
            found[name] = text
    return found | loaded_libraries(maps)


def _gpus() -> list[str]:
    from epdecode.doctor import nvml

    gpus = nvml.read()
    if not gpus.devices:
        return [gpus.reason]
    driver = f"driver {gpus.driver}, CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}"
    return [driver] + [
        f"{gpu.index}: {gpu.name}, {gpu.capability[0]}.{gpu.capability[1]}, "
        f"{gpu.memory_bytes / 2**30:.0f} GiB, {gpu.nvlinks} NVLinks up"
        for gpu in gpus.devices
    ]


def _rdma() -> list[str]:
    from epdecode.doctor.network import rdma_devices

    return [f"{name}: {state}, {link}" for name, (state, link) in rdma_devices(Path("/")).items()]


def _interfaces() -> dict[str, str]:
    stats = psutil.net_if_stats()
    return {
        name: ", ".join(address.address for address in addresses if "." in address.address)
        + (" (down)" if name in stats and not stats[name].isup else "")
        for name, addresses in psutil.net_if_addrs().items()
    }


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter here, by allow-list."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in VARIABLES or name in SLURM or name.startswith(PREFIXES)
    }


PROBES: dict[str, Callable[[], Any]] = {
    "host": _host,
    "commit": lambda: commit() or "none: not a checkout",
    "loaded": _loaded,
    "installed": _installed,
    "gpus": _gpus,
    "rdma": _rdma,
    "interfaces": _interfaces,
    "variables": lambda: relevant(os.environ),
}
