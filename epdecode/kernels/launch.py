"""What every launcher needs: grid sizes, and the early launch that Hopper offers."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

INTERPRETED_PROGRAMS = 6
"""Programs of a persistent grid under the interpreter: few, but more than one round each."""


@lru_cache(maxsize=8)
def _properties(index: int) -> tuple[int, int]:
    """(multiprocessors, major compute capability)."""
    found = torch.cuda.get_device_properties(index)
    return found.multi_processor_count, found.major


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def persistent_programs(device: torch.device, per_processor: int, items: int) -> int:
    """Programs of a grid that walks ``items`` pieces of work: no more than either bound."""
    if device.type != "cuda":
        return min(items, INTERPRETED_PROGRAMS)
    return min(items, per_processor * _properties(_index(device))[0])


def early_launch(device: torch.device) -> bool:
    """May kernels be launched while the one before still runs (programmatic dependent launch)?

    Such a kernel waits for that one's end before it reads or writes anything, so nothing changes
    but the gap between the two, about half a microsecond. Compute capability 9.0 and above.
    """
    return device.type == "cuda" and _properties(_index(device))[1] >= 9


def launch_options(device: torch.device) -> dict[str, bool]:
    """Launch keywords for a kernel that was given PDL = early_launch(device)."""
    return {"launch_pdl": True} if early_launch(device) else {}


def power_of_two(number: int) -> int:
    """The least power of two not below ``number``."""
    return int(triton.next_power_of_2(max(1, number)))
