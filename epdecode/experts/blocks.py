"""Where each expert's block of a packed batch begins and ends."""

from __future__ import annotations

import torch


def block_ends(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """counts int32 [E] -> int32 [E], one past each block's last real row; nothing synchronises.

    A block starts at the next multiple of ``alignment`` after the end of the one before: DeepGEMM's
    prefix-sum layout, by which it finds blocks without looking at labels.
    """
    padded = torch.div(counts + (alignment - 1), alignment, rounding_mode="floor") * alignment
    return torch.cumsum(padded, 0, dtype=torch.int32) - padded + counts
