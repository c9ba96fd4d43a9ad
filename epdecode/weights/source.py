"""All layers' weights of one rank, from seeds or from a checkpoint, with what reading them took."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from epdecode.config import Config
from epdecode.errors import ConfigError
from epdecode.plan import Plan
from epdecode.plan.memory import weight_bytes
from epdecode.weights.checkpoint import Checkpoint
from epdecode.weights.load import CheckpointWeights
from epdecode.weights.seeded import LayerWeights, SeededWeights
from epdecode.world import World

LONG_BYTES = 1 << 30
"""A load from which on a bar is shown."""


@dataclass(frozen=True, slots=True)
class Loading:
    """What one rank's weights took: bytes read from files (0 when seeded), seconds in all."""

    bytes: int
    seconds: float


def load_weights(
    config: Config, plan: Plan, world: World, checkpoint: Checkpoint | None
) -> tuple[tuple[LayerWeights, ...], Loading]:
    """Every layer of the loop with this rank's experts, from where ``config.weights`` says."""
    start = time.perf_counter()
    if config.weights.source == "seeded":
        seeded = SeededWeights(plan.model, plan.plain_expert_size, config.run.seed, world.device)
        return _loaded(plan, world, seeded.layer, start, _Count())
    if checkpoint is None:
        raise ConfigError("weights.source: checkpoint needs one that has been opened and checked")
    expected = plan.layers * weight_bytes(checkpoint.shape, plan.num_local_experts)
    with (
        _counting(expected, world) as count,
        CheckpointWeights(checkpoint, plan.model, world.device, count.add) as source,
    ):
        return _loaded(plan, world, source.layer, start, count)


def _loaded(
    plan: Plan,
    world: World,
    read: Callable[[int, Sequence[int]], LayerWeights],
    start: float,
    count: _Count,
) -> tuple[tuple[LayerWeights, ...], Loading]:
    layers = tuple(
        read(layer.number, plan.local_experts(world.rank, index))
        for index, layer in enumerate(plan.loop_layers)
    )
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return layers, Loading(count.bytes, time.perf_counter() - start)


class _Count:
    """Bytes read so far, added to by several threads."""

    def __init__(self, show: Callable[[int], None] = lambda total: None) -> None:
        self.bytes = 0
        self._lock = threading.Lock()
        self._show = show

    def add(self, more: int) -> None:
        """``more`` bytes have been read."""
        with self._lock:
            self.bytes += more
            self._show(self.bytes)


@contextmanager
def _counting(expected: int, world: World) -> Iterator[_Count]:
    """A count, shown as a bar by rank 0 on a terminal when there is much to read."""
    if world.rank or expected < LONG_BYTES or not sys.stderr.isatty():
        yield _Count()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("weights", total=expected)
        yield _Count(lambda total: progress.update(bar, completed=total))
