"""Where a rank is, kept where its peers on the same host can still read it after its death."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PhaseName = Literal["join", "load", "warmup", "steps", "report", "left"]
PHASES: tuple[PhaseName, ...] = ("join", "load", "warmup", "steps", "report", "left")

PASS_END = "pass_end"
"""The stage of a rank that has begun every step of a pass and waits for its peers."""

RECORD = struct.Struct("<5q32s")
"""phase, step (-1 = none), ticks, moves, length of the stage, stage."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is."""

    phase: PhaseName
    step: int | None
    stage: str | None
    ticks: int
    """Stages entered in the present phase; after the steps, in the steps."""
    moves: int
    """Grows with every move."""


START = Position("join", None, None, 0, 0)


class Progress:
    """The main thread's own position: it writes, the watch's threads read.

    On Linux every move is also written to anonymous shared memory, whose descriptor ``handle``
    peers open through /proc while this process lives; elsewhere handle is -1.
    """

    __slots__ = ("_shared", "_texts", "handle", "moves", "phase", "stage", "step", "ticks")

    def __init__(self) -> None:
        self.phase: PhaseName = "join"
        self.step: int | None = None
        self.stage: str | None = None
        self.ticks = 0
        self.moves = 0
        self.handle = -1
        self._shared: mmap.mmap | bytearray = bytearray(RECORD.size)
        self._texts: dict[str | None, bytes] = {None: b""}
        if hasattr(os, "memfd_create"):
            self.handle = os.memfd_create("epdecode-progress", os.MFD_CLOEXEC)
            os.ftruncate(self.handle, RECORD.size)
            self._shared = mmap.mmap(self.handle, RECORD.size)
        self.moved()

    def moved(self) -> None:
        """Publish the fields after changing them."""
        self.moves += 1
        text = self._texts.get(self.stage)
        if text is None:
            text = self._texts[self.stage] = (self.stage or "").encode()[:32]
        RECORD.pack_into(
            self._shared,
            0,
            PHASES.index(self.phase),
            -1 if self.step is None else self.step,
            self.ticks,
            self.moves,
            len(text),
            text,
        )

    def position(self) -> Position:
        """A copy of the fields."""
        return Position(self.phase, self.step, self.stage, self.ticks, self.moves)

    def close(self) -> None:
        """Give the shared memory back."""
        if isinstance(self._shared, mmap.mmap):
            self._shared.close()
            self._shared = bytearray(RECORD.size)
            os.close(self.handle)
            self.handle = -1


class PeerProgress:
    """Another process's position, read from its shared memory."""

    def __init__(self, pid: int, handle: int) -> None:
        """Raises OSError where it cannot be opened: other host, other user, process gone."""
        with Path(f"/proc/{pid}/fd/{handle}").open("rb") as file:
            self._shared = mmap.mmap(file.fileno(), RECORD.size, prot=mmap.PROT_READ)

    def position(self) -> Position:
        """The latest; consistent once the peer no longer moves."""
        phase, step, ticks, moves, length, text = RECORD.unpack_from(self._shared)
        stage = text[:length].decode(errors="replace") or None
        return Position(PHASES[phase], None if step < 0 else step, stage, ticks, moves)


WAITING_IN = ("torch/distributed/", "torch/cuda/")
DEEPEST = 8


def main_thread_waits() -> bool:
    """The main thread is in a collective or waits for the GPU, as its innermost frames show.

    Tells a rank that waits for its peers from the one they wait for when both are in one stage.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for _ in range(DEEPEST):
        if frame is None:
            break
        name = frame.f_code.co_filename.replace(os.sep, "/")
        if any(place in name for place in WAITING_IN):
            return True
        frame = frame.f_back
    return False
