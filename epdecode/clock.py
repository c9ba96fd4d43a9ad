"""Clocks: how long a step took, and its stages. HostClock and CudaClock answer the same calls.

A recorder's ``mark`` is handed to the layers. On CUDA it records external timing events, which
stay in a captured graph and are stamped anew at every replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

Elapsed = Callable[[], float]


class Recorder(Protocol):
    """Stage stamps of one step."""

    def start(self) -> None:
        """Stamp the beginning; forget earlier marks."""
        ...

    def mark(self, stage: str) -> None:
        """Stamp the end of ``stage``."""
        ...

    def stages(self) -> dict[str, float]:
        """Microseconds by stage, summed over layers, of the last completed step."""
        ...


class Clock(Protocol):
    """Times steps on one device."""

    name: str

    def recorder(self) -> Recorder:
        """Fresh stage stamps."""
        ...

    def time(self, step: Callable[[], object]) -> Elapsed:
        """Start the step; the answer waits for its end and gives microseconds."""
        ...

    def synchronize(self) -> None:
        """Wait for everything under way."""
        ...


class HostRecorder:
    """Stamps of the host's monotonic clock."""

    def __init__(self) -> None:
        self._stamps: list[tuple[str, float]] = []

    def start(self) -> None:
        """See Recorder."""
        self._stamps = [("", time.perf_counter())]

    def mark(self, stage: str) -> None:
        """See Recorder."""
        self._stamps.append((stage, time.perf_counter()))

    def stages(self) -> dict[str, float]:
        """See Recorder."""
        spans: dict[str, float] = {}
        for (_, before), (stage, after) in zip(self._stamps, self._stamps[1:], strict=False):
            spans[stage] = spans.get(stage, 0.0) + 1e6 * (after - before)
        return spans


class HostClock:
    """CPU: a step is over when its call returns."""

    name = "host monotonic"

    def recorder(self) -> HostRecorder:
        """See Clock."""
        return HostRecorder()

    def time(self, step: Callable[[], object]) -> Elapsed:
        """See Clock."""
        begin = time.perf_counter()
        step()
        took = 1e6 * (time.perf_counter() - begin)
        return lambda: took

    def synchronize(self) -> None:
        """See Clock."""


def _event(external: bool = False) -> torch.cuda.Event:
    """A timing event; an external one is stamped at every replay of the graph it is in."""
    made: torch.cuda.Event = torch.cuda.Event(enable_timing=True, external=external)  # type: ignore[no-untyped-call]
    return made


class CudaRecorder:
    """External events: captured once, stamped at every replay."""

    def __init__(self) -> None:
        self._stamps: list[tuple[str, torch.cuda.Event]] = []

    def start(self) -> None:
        """See Recorder."""
        self._stamps = []
        self.mark("")

    def mark(self, stage: str) -> None:
        """See Recorder."""
        event = _event(external=True)
        event.record()
        self._stamps.append((stage, event))

    def stages(self) -> dict[str, float]:
        """See Recorder."""
        spans: dict[str, float] = {}
        for (_, before), (stage, after) in zip(self._stamps, self._stamps[1:], strict=False):
            spans[stage] = spans.get(stage, 0.0) + 1e3 * before.elapsed_time(after)
        return spans


class CudaClock:
    """CUDA events around the step, on the current stream."""

    name = "cuda events"

    def recorder(self) -> CudaRecorder:
        """See Clock."""
        return CudaRecorder()

    def time(self, step: Callable[[], object]) -> Elapsed:
        """See Clock."""
        begin, end = _event(), _event()
        begin.record()
        step()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return 1e3 * float(begin.elapsed_time(end))

        return elapsed

    def synchronize(self) -> None:
        """See Clock."""
        torch.cuda.synchronize()


def build_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
