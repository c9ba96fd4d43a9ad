"""What every launcher needs: how many programs fill the device, and powers of two."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

INTERPRETED_PROGRAMS = 6
"""Programs of a persistent grid under the interpreter: few, but more than one round each."""


@lru_cache(maxsize=8)
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def persistent_programs(device: torch.device, per_processor: int, items: int) -> int:
    """Programs of a grid that walks ``items`` pieces of work: no more than either bound."""
    if device.type != "cuda":
        return min(items, INTERPRETED_PROGRAMS)
    index = torch.cuda.current_device() if device.index is None else device.index
    return min(items, per_processor * _processors(index))


def power_of_two(number: int) -> int:
    """The least power of two not below ``number``."""
    return int(triton.next_power_of_2(max(1, number)))
