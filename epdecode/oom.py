"""Out of memory, said in terms of the plan."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from epdecode.errors import OutOfMemory
from epdecode.plan import Plan

GIB = 1 << 30
SAYS_SO = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
    r"|can't allocate memory|Cannot allocate memory",
    re.IGNORECASE,
)
"""CUDA, Triton, DeepGEMM, DeepEP, cuBLAS and torch's CPU allocator raise a plain RuntimeError: only
its text tells."""
ASKED = re.compile(r"ried to allocate (\d[\d.]* ?\w+)")
OTHERS = re.compile(r"Process (\d+) has (\d[\d.]* \w+) memory in use")
"""In torch's message, where the driver tells who else is on the device."""
LOWER = "Lower layers or transport.max_tokens_per_rank, or put fewer ranks on the GPU"


@contextmanager
def explained(doing: str, plan: Plan, device: torch.device) -> Iterator[None]:
    """Turn any library's want of memory into OutOfMemory: what was asked, what was free, what to
    lower. Other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        shortage = find_shortage(error)
        if shortage is None:
            raise
        free = _free_host() if _is_host(shortage, device) else _free(device)
        raise OutOfMemory(
            f"out of memory while {doing}: {_asked(shortage)}; {free}{_others(shortage)}. "
            f"{_planned(plan)}. {LOWER}"
        ) from error


def check_free(plan: Plan, device: torch.device) -> None:
    """Raise OutOfMemory when what is free cannot hold the transport's buffer and the weights.

    Somebody else may be on the device. Before loading, because NVSHMEM says nothing of memory when
    it gets none, and because a checkpoint takes minutes to read.
    """
    if device.type != "cuda":
        return
    need = plan.memory["weights"] + plan.memory.get("transport_buffer", 0)
    if need > torch.cuda.mem_get_info(device)[0]:
        raise OutOfMemory(
            f"out of memory before loading: weights and the transport's buffer take "
            f"{need / GIB:.2f} GiB; {_free(device)}; nvidia-smi shows who holds the rest. "
            f"{_planned(plan)}. {LOWER}"
        )


def find_shortage(error: BaseException) -> BaseException | None:
    """The want of memory behind ``error``: itself, or what it was raised from or while handling.

    Leaving a broken capture raises an error of its own on top of the one that broke it.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if _is_shortage(found):
            return found
        found = found.__cause__ or found.__context__
    return None


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and SAYS_SO.search(str(error)) is not None


def _asked(error: BaseException) -> str:
    text = str(error)
    if match := ASKED.search(text):
        return f"asked for {match[1]}"
    lines = text.strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _others(error: BaseException) -> str:
    return "".join(f", {size} by process {pid}" for pid, size in OTHERS.findall(str(error)))


def _is_host(error: BaseException, device: torch.device) -> bool:
    own = isinstance(error, MemoryError | OSError) or "allocate memory" in str(error)
    return own or device.type != "cuda"


def _planned(plan: Plan) -> str:
    sizes = sorted(plan.memory.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes)
    return f"The plan of a rank, in GiB: {parts}; {plan.memory_bytes / GIB:.2f} in all"


def _free_host() -> str:
    memory = psutil.virtual_memory()
    return f"{memory.available / GIB:.2f} of {memory.total / GIB:.2f} GiB free on the host"


def _free(device: torch.device) -> str:
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # a device in disorder must not hide why
        return "what is free on the device cannot be told"
    held = torch.cuda.memory_reserved(device)
    return (
        f"{free / GIB:.2f} of {total / GIB:.2f} GiB free on the device, {held / GIB:.2f} GiB held "
        "by this rank's torch"
    )
