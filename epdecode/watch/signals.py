"""Signals, received without the main thread: it may be waiting in a collective for ever.

SIGTERM and SIGUSR1 (Slurm's notice before the end) ask for a stop that keeps everything, SIGINT
likewise; a second one asks to leave at once.
"""

from __future__ import annotations

import os
import select
import signal
import time
from types import FrameType, TracebackType
from typing import Any

from epdecode.errors import Exit

EXIT_OF = {
    signal.SIGTERM: Exit.PREEMPTED,
    signal.SIGUSR1: Exit.PREEMPTED,
    signal.SIGINT: Exit.INTERRUPTED,
}

ECHO_S = 1.0
"""A launcher passes on what it was sent, and Slurm signals launcher and ranks alike: the same
notice arrives twice within this time."""


class SignalInbox:
    """Takes the signals over; another thread reads them. Use as a context in the main thread."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.first_at = 0.0
        self.again = False
        """A second signal came, later than an echo would."""
        self._reader, self._writer = -1, -1
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in EXIT_OF:
            self._before[number] = signal.signal(number, _heard_elsewhere)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writer)
        os.close(self._reader)
        self._reader = self._writer = -1

    def wait(self, timeout_s: float) -> None:
        """Wait for a signal, at most ``timeout_s``, and note it."""
        reader = self._reader
        if reader < 0:
            time.sleep(timeout_s)
            return
        try:
            ready, _, _ = select.select([reader], [], [], timeout_s)
            numbers = os.read(reader, 64) if ready else b""
        except (OSError, ValueError):  # closed meanwhile
            return
        for number in numbers:
            if number in EXIT_OF:
                self._note(signal.Signals(number))

    def _note(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self.first_at = number, now
        elif now - self.first_at > ECHO_S:
            self.again = True


def _heard_elsewhere(number: int, frame: FrameType | None) -> None:
    """Nothing to do here: the wake-up descriptor has passed the number on."""
