"""Out of memory, said in terms of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from epdecode.errors import OutOfMemory
from epdecode.plan import Plan

GIB = 1 << 30


@contextmanager
def explained(doing: str, plan: Plan, device: torch.device) -> Iterator[None]:
    """Turn an allocator's error into OutOfMemory: what was asked, what was free, what to lower."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        asked = str(error).split(". ")[0] or type(error).__name__
        planned = ", ".join(
            f"{name} {size / GIB:.2f}"
            for name, size in sorted(plan.memory.items(), key=lambda item: -item[1])
        )
        raise OutOfMemory(
            f"out of memory while {doing}: {asked}; {_free(device)}. The plan, in GiB: {planned}. "
            "Lower layers or transport.max_tokens_per_rank, or put fewer ranks on the GPU"
        ) from error


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return "host memory"
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    return (
        f"{free / GIB:.2f} of {total / GIB:.2f} GiB free on the device, {held / GIB:.2f} GiB held "
        "by this rank"
    )
