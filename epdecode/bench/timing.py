"""Times GPU calls inside CUDA graphs: hot, cold, and the device's own read and copy streams.

Hot: one call repeated on the same buffers. Cold: the same call over buffer sets that together
exceed the L2 cache many times, so that nothing a call reads was left there by an earlier one.
Calls run back to back in one graph; host launch cost and timer resolution are not in the figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import torch

from epdecode.errors import EnvironmentFault
from epdecode.kernels.streams import BLOCK, copy_stream, read_stream

Call = Callable[[], object]
"""Enqueues work on the current stream: no host synchronisation, no allocation that matters."""

COLD_BYTES = 300_000_000
"""Bytes a cold rotation touches before a buffer set is used again; six times an H200's L2."""
MOST_SETS = 512


@dataclass(frozen=True, slots=True)
class Micros:
    """Microseconds per call over ``n`` replays of a graph of ``calls`` calls."""

    n: int
    calls: int
    min: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class Streams:
    """What this device's memory does, measured here: 1e12 bytes per second."""

    read_tb_s: float
    copy_tb_s: float
    """Bytes read plus bytes written."""


def require_cuda() -> None:
    """Refuse to time anything where there is no GPU."""
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            "timing needs a CUDA GPU and none is visible (CUDA_VISIBLE_DEVICES, driver); "
            "correctness checks run without one"
        )


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One graph that does every call once, in order; each was run eagerly before (compilation)."""
    require_cuda()
    warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graph_us(calls: Sequence[Call], replays: int = 30, warmup: int = 3) -> Micros:
    """Capture ``calls`` in one graph and time its replays, per call.

    All replays are enqueued behind a sleep, so the device never waits for the host between them.
    """
    graph = capture(calls)
    for _ in range(warmup):
        graph.replay()
    event = torch.cuda.Event
    events = [event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
    graph.replay()
    events[0].record()
    for done in events[1:]:
        graph.replay()
        done.record()
    torch.cuda.synchronize()
    spans = [
        before.elapsed_time(after) * 1e3 / len(calls)
        for before, after in zip(events, events[1:], strict=False)
    ]
    return Micros(replays, len(calls), min(spans), median(spans), quantiles(spans, n=10)[8])


def hot_us(call: Call, calls: int = 20, replays: int = 30) -> Micros:
    """Time ``call`` repeated on the same buffers (what it touches stays in L2 if it fits)."""
    return graph_us([call] * calls, replays)


def cold_us(calls: Sequence[Call], replays: int = 10) -> Micros:
    """Time ``calls``, one per buffer set of a rotation of ``cold_sets`` sets."""
    return graph_us(calls, replays)


def cold_sets(touched_bytes: int) -> int:
    """Buffer sets a cold rotation needs when one call touches ``touched_bytes``."""
    return min(MOST_SETS, max(2, math.ceil(COLD_BYTES / max(1, touched_bytes)) + 1))


def measure_streams(num_bytes: int = 1 << 32) -> Streams:
    """Best median read and copy rates over ``num_bytes`` each way (less when memory is short).

    4 GiB: what of the last pass is still in L2 is then about 1% of a pass.
    """
    require_cuda()
    num_bytes = min(num_bytes, torch.cuda.mem_get_info()[0] // 4)
    words = num_bytes // 4 // BLOCK * BLOCK
    source = torch.randint(0, 1 << 31, (words,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    processors = torch.cuda.get_device_properties(source.device).multi_processor_count
    sums = [torch.empty(processors * k, dtype=torch.int32, device="cuda") for k in (4, 8)]
    read = min(graph_us([partial(read_stream, source, s)], 5, 1).p50 for s in sums)
    copy = graph_us([partial(copy_stream, source, target)], 5, 1).p50
    return Streams(4 * words / read / 1e6, 8 * words / copy / 1e6)
