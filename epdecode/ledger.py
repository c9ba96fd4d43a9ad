"""What each part of a runtime really took of the device's memory while it was built."""

from __future__ import annotations

import torch


class Ledger:
    """Device memory taken between two notes: from the allocator, or outside it.

    What is taken outside can only be told where no other rank is on the GPU.
    """

    def __init__(self, device: torch.device, alone: bool) -> None:
        self._device = device
        self._alone = alone and device.type == "cuda"
        self._before = self._now()
        self.taken: dict[str, int] = {}
        self._outside = self._used() if self._alone else 0
        if self._alone:
            self.taken["context"] = self._outside - torch.cuda.memory_reserved(device)

    def note_outside(self, category: str) -> None:
        """Book what was taken outside the allocator since the beginning."""
        if self._alone:
            self.taken[category] = self._used() - self._outside

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def note(self, category: str) -> None:
        """Book what the allocator handed out since the last note."""
        now = self._now()
        self.taken[category] = now - self._before
        self._before = now

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
