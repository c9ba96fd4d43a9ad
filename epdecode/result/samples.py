"""samples.jsonl: one line per rank, pass and step, appended while the run goes on."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from epdecode.errors import NotSaved
from epdecode.result.save import RunFolder, atomic_write, write_all

Pass = Literal["warmup", "plain", "instrumented"]


class SampleWriter:
    """Appends one rank's samples from a thread, so that the step never waits for the disk.

    Written every tenth of the interval, so that the death of this process costs little, and on
    disk every interval, for the death of the host.

    Only whole lines are left in the file: after a failed write it is cut back to the last of them.
    """

    def __init__(self, folder: RunFolder, rank: int, interval_s: float = 1.0) -> None:
        self.path = folder.parts / f"rank{rank:05d}.jsonl"
        self._rank = rank
        self._lines: list[str] = []
        self._error: OSError | None = None
        self._handle = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_flushing, args=(interval_s,), name="samples", daemon=True
        )
        self._thread.start()

    def add(
        self, pass_name: Pass, step: int, us: float, stages: dict[str, float] | None = None
    ) -> None:
        """Note one step: microseconds, and microseconds per stage in one layer where stamped."""
        line: dict[str, Any] = {"rank": self._rank, "pass": pass_name, "step": step, "us": us}
        if stages:
            line["stages"] = stages
        self._lines.append(json.dumps(line, allow_nan=False) + "\n")

    def flush(self, durable: bool = True) -> None:
        """Write what was noted; durable: on disk. Any thread; a failure shows in close()."""
        with self._lock:
            if self._error or self._handle < 0:
                return
            whole = os.fstat(self._handle).st_size
            count = len(self._lines)
            try:
                write_all(self._handle, "".join(self._lines[:count]).encode())
                if durable:
                    os.fsync(self._handle)
            except OSError as error:
                self._error = error
                os.ftruncate(self._handle, whole)
            else:
                del self._lines[:count]

    def close(self) -> None:
        """Flush and close. Raises NotSaved when any write failed."""
        self._closing.set()
        self._thread.join()
        self.flush()
        with self._lock:
            if self._handle >= 0:
                os.close(self._handle)
                self._handle = -1
        if self._error:
            raise NotSaved(
                f"{self.path}: samples not written: {self._error.strerror or self._error}"
            ) from self._error

    def _keep_flushing(self, interval_s: float) -> None:
        rounds = 0
        while not self._closing.wait(interval_s / 10):
            rounds += 1
            if self._lines or rounds % 10 == 0:
                self.flush(durable=rounds % 10 == 0)


def merge_samples(folder: RunFolder) -> None:
    """Gather all ranks' parts in samples.jsonl, by rank. Raises NotSaved; the parts stay then."""
    parts = sorted(folder.parts.glob("rank*.jsonl"))
    text = "".join(json.dumps(line) + "\n" for part in parts for line in _whole_lines(part))
    try:
        atomic_write(folder.samples, text)
    except OSError as error:
        raise NotSaved(
            f"{folder.samples}: not written: {error.strerror or error}; the samples are in "
            f"{folder.parts}"
        ) from error
    with suppress(OSError):
        for part in parts:
            part.unlink()
        folder.parts.rmdir()


def read_samples(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Every sample, merged or not; a line torn by a crash is left out."""
    if folder.samples.exists():
        yield from _whole_lines(folder.samples)
        return
    for part in sorted(folder.parts.glob("rank*.jsonl")):
        yield from _whole_lines(part)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
