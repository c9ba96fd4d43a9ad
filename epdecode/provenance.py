"""Enough to run it again: versions as loaded, commit, GPU, place of each rank, command."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from importlib import metadata
from pathlib import Path

import torch

import epdecode
from epdecode.commit import commit
from epdecode.result import Provenance, RankPlace
from epdecode.result.save import utc_now
from epdecode.world import World

_DISTRIBUTIONS = {
    "triton": ("triton",),
    "deep_ep": ("tokenspeed-deepep", "sgl-deep-ep", "deep-ep"),
    "deep_gemm": ("tokenspeed-deepgemm", "sgl-deep-gemm", "deep-gemm"),
    "nvshmem": ("nvshmem4py-cu13", "nvshmem4py-cu12"),
}
"""Module -> the distributions that may hold it."""


def loaded_versions() -> dict[str, str | None]:
    """Library -> version, of what this process has imported; None = not loaded."""
    versions: dict[str, str | None] = {
        "epdecode": epdecode.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "driver": _driver(),
        "nvshmem_host": _nvshmem_host(),
    }
    for module, distributions in _DISTRIBUTIONS.items():
        versions[module] = _version(distributions) if module in sys.modules else None
    return versions


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def _nvshmem_host() -> str | None:
    """The file that is mapped, which may not be the one that is installed."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(r"(\S*libnvshmem_host\.so\S*)", maps)
    return Path(found.group(1)).resolve().name if found else None


def make_provenance(world: World, started_utc: str) -> Provenance:
    """Collective: every rank tells where it runs."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    mine = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(world.device),
    }
    places = [json.loads(text) for text in world.gather_text(json.dumps(mine))]
    return Provenance(
        epdecode=epdecode.__version__,
        commit=commit(),
        versions=loaded_versions(),
        gpu=gpu,
        ranks=tuple(RankPlace(**place) for place in places),
        command=tuple(sys.argv),
        started_utc=started_utc,
        finished_utc=utc_now(),
    )
