"""Agreeing on the step after which all ranks stop together.

Ranks run in lockstep through their collectives, so none may stop a step before another. When a
stop is asked, each promises to begin no step beyond those begun; the largest promise is the stop.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class StopGate:
    """Counts the steps this rank has begun; the loop asks it before each of them."""

    def __init__(self) -> None:
        self._begun = 0
        self._promise: int | None = None
        self._last: int | None = None
        self._stopped = False
        self._changed = threading.Condition()

    def may_begin(self) -> bool:
        """Begin one more step? Waits while a stop is being agreed; False = stop here."""
        with self._changed:
            if self._promise is not None:
                self._changed.wait_for(lambda: self._last is not None)
                if self._begun >= (self._last or 0):
                    self._stopped = True
                    return False
            self._begun += 1
            return True

    def promise(self) -> int:
        """The steps begun; none is begun any more until decide()."""
        with self._changed:
            if self._promise is None:
                self._promise = self._begun
            return self._promise

    @property
    def promised(self) -> int | None:
        """The promise, None before a stop was asked."""
        return self._promise

    def decide(self, promises: Iterable[int]) -> None:
        """All ranks' promises, this one's among them, are known."""
        with self._changed:
            self._last = max(promises)
            self._changed.notify_all()

    @property
    def decided(self) -> bool:
        """The last step is known."""
        return self._last is not None

    @property
    def stopped(self) -> bool:
        """The loop was told to stop."""
        return self._stopped
