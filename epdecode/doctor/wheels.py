"""Which deep_ep and deep_gemm wheels go with which torch, and what a failed import means.

The sets are those of docs/dependencies.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSet:
    """Wheels that load together: C++ extensions are bound to the torch they were built for."""

    torch: tuple[str, ...]
    """major.minor of the torch releases it loads with."""
    deep_ep: str
    deep_gemm: str
    run: bool
    """Has been run on an H200, not only recorded."""

    @property
    def install(self) -> str:
        """What to type."""
        newest = self.torch[-1]
        major, minor = newest.split(".")
        return (
            f"pip install 'torch>={self.torch[0]},<{major}.{int(minor) + 1}' "
            f"{self.deep_ep} {self.deep_gemm}"
        )


WHEEL_SETS = (
    WheelSet(
        torch=("2.11", "2.12"),
        deep_ep="tokenspeed-deepep==1.2.1.post20251110",
        deep_gemm="tokenspeed-deepgemm==2.5.0.post20260604",
        run=True,
    ),
    WheelSet(
        torch=("2.13",),
        deep_ep="sgl-deep-ep==0.1.0",
        deep_gemm="sgl-deep-gemm==0.2.0",
        run=False,
    ),
    WheelSet(
        torch=("2.14",),
        deep_ep="sgl-deep-ep==0.1.2.post1",
        deep_gemm="sgl-deep-gemm==0.2.5",
        run=False,
    ),
)


def set_for(torch_version: str) -> WheelSet | None:
    """The set for a torch version such as ``2.11.0+cu130``; None when there is none."""
    release = ".".join(torch_version.split(".")[:2])
    return next((wheels for wheels in WHEEL_SETS if release in wheels.torch), None)


def remedy(torch_version: str) -> str:
    """What to install, for the torch that is there."""
    wheels = set_for(torch_version)
    if wheels is None:
        best = WHEEL_SETS[0]
        known = ", ".join(release for each in WHEEL_SETS for release in each.torch)
        return f"no wheel set is known for torch {torch_version} (known: {known}): {best.install}"
    note = "" if wheels.run else " (recorded, not run by this project; torch 2.11 is)"
    return f"{wheels.install}{note}"


@dataclass(frozen=True, slots=True)
class ImportCause:
    """One known way for an extension module's import to fail."""

    pattern: str
    cause: str
    fix: str
    """``{remedy}`` stands for the matching wheel set."""


IMPORT_CAUSES = (
    ImportCause(
        r"undefined symbol",
        "built for another torch or CUDA than the one installed (ABI mismatch)",
        "{remedy}",
    ),
    ImportCause(
        r"libnvshmem_host\.so",
        "the NVSHMEM host library is not found",
        "pip install nvidia-nvshmem-cu13, and put site-packages/nvidia/nvshmem/lib on "
        "LD_LIBRARY_PATH (scripts/offline_gpu.sh exec does)",
    ),
    ImportCause(
        r"libcudart\.so\.(\d+)|libnvrtc\.so\.(\d+)|libcublas(Lt)?\.so\.(\d+)",
        "built for another CUDA major version than torch's",
        "{remedy}",
    ),
    ImportCause(r"lib(torch|c10)\w*\.so", "torch's own libraries are not found", "{remedy}"),
    ImportCause(
        r"GLIBC(XX)?_\d",
        "built for a newer system library than this machine has",
        "use a newer container or operating system, or build the library here",
    ),
    ImportCause(
        r"^AssertionError",
        "an assertion at import; deep_gemm 2.5 asserts that a CUDA toolkit is found",
        "set CUDA_HOME to a CUDA toolkit with nvcc (12.3 or above; 12.9 for compute capability "
        "10), or put nvcc on PATH",
    ),
    ImportCause(
        r"^(ModuleNotFoundError|not installed)",
        "not installed",
        "{remedy}",
    ),
    ImportCause(
        r"^killed by signal",
        "the library crashes while it is loaded, most often an ABI mismatch",
        "{remedy}",
    ),
)


def explain_import(error: str, torch_version: str) -> tuple[str, str]:
    """(cause, fix) of an import error's text, for the torch that is installed."""
    for known in IMPORT_CAUSES:
        if re.search(known.pattern, error, re.MULTILINE):
            return known.cause, known.fix.format(remedy=remedy(torch_version))
    return "not a known cause", remedy(torch_version)
