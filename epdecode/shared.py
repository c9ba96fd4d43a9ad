"""The shared expert: every token of this rank through one more expert, added after combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from epdecode.batch import ExpertWeights, MaskedBatch, Rows, no_mark
from epdecode.experts import Experts

Fill = Callable[[torch.Tensor, Rows], None]
"""fill(normed, rows): bring normed [T, H] into the first T rows of the input buffer."""


class SharedExpert(Protocol):
    """Starts beside the dispatch, is added after the combine."""

    def start(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Begin on normed [T, H], of which num_tokens (int32 [1], on the device) are real."""
        ...

    def add_to(self, routed: torch.Tensor) -> torch.Tensor:
        """routed + shared, bfloat16 [T, H]."""
        ...


class NoSharedExpert:
    """A model without shared experts."""

    def start(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Nothing to do."""

    def add_to(self, routed: torch.Tensor) -> torch.Tensor:
        """The routed output as it is."""
        return routed


class Lane(Protocol):
    """Where side work runs."""

    def run(self, work: Callable[[], None]) -> None:
        """Start ``work`` after what is already enqueued."""
        ...

    def join(self) -> None:
        """Order what follows after the work."""
        ...


class SerialLane:
    """In line with everything else."""

    def run(self, work: Callable[[], None]) -> None:
        """See Lane."""
        work()

    def join(self) -> None:
        """See Lane."""


class StreamLane:
    """A CUDA stream of its own, forked from and joined to the current one; capturable."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def run(self, work: Callable[[], None]) -> None:
        """See Lane."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """See Lane."""
        torch.cuda.current_stream().wait_stream(self._stream)


class GroupedSharedExpert:
    """The shared expert as a grouped GEMM of one group, through the experts member itself.

    The count of real rows stays on the device, as in a MaskedBatch; all buffers are made once.
    """

    def __init__(
        self, experts: Experts, weights: ExpertWeights, rows: Rows, fill: Fill, lane: Lane
    ) -> None:
        self._experts = experts
        self._weights = experts.prepare(weights)
        self._rows = rows
        self._fill = fill
        self._lane = lane
        self._out: torch.Tensor | None = None

    def start(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """See SharedExpert."""

        def work() -> None:
            self._fill(normed, self._rows)
            batch = MaskedBatch(self._rows, num_tokens, normed.shape[0])
            self._out = self._experts(batch, self._weights, no_mark)

        self._lane.run(work)

    def add_to(self, routed: torch.Tensor) -> torch.Tensor:
        """See SharedExpert. Padded rows add whatever the workspace holds; nobody reads them."""
        self._lane.join()
        if self._out is None:
            raise RuntimeError("add_to before start")
        return routed + self._out[0, : routed.shape[0]]
