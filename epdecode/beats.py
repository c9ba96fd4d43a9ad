"""The thread that tells the other ranks where this one is, and hears where they are.

It alone talks to the store, through a client of its own, so that neither a blocked main thread nor
a dead store keeps the judging thread from judging.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Protocol

from epdecode.blame import PhaseName
from epdecode.processes import Identity
from epdecode.result import Cause

SUCCESSORS = 16
"""Ranks whose beats a rank follows; their verdict reaches everyone through the store."""


class Store(Protocol):
    """What is asked of torch's TCPStore, FileStore or PrefixStore. Every call may raise."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def add(self, key: str, amount: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Beat:
    """One rank's news."""

    count: int
    phase: PhaseName
    step: int | None
    stage: str | None
    ticks: int
    moves: int
    promise: int | None
    """Steps begun when a stop was asked; it begins no more until all have said theirs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ends the run on every rank."""

    cause: Cause
    exit_code: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A rank's latest beat and when (monotonic) it and its progress last changed."""

    beat: Beat
    beat_at: float
    moved_at: float


class Beats(threading.Thread):
    """Publishes ``mine(count)`` and follows the others. Public fields are read by the judge."""

    def __init__(
        self, store: Store, rank: int, size: int, interval_s: float, mine: Callable[[int], Beat]
    ) -> None:
        super().__init__(name="watch-beats", daemon=True)
        self.heard: dict[int, Heard] = {}
        self.identities: dict[int, Identity] = {}
        self.verdict: Verdict | None = None
        self.stop: str | None = None
        self.saved = False
        self.round_started = 0.0
        """When the latest complete round began: what was published before then has been heard."""
        self.answered_at = time.monotonic()
        self.error: Exception | None = None
        self._store, self._rank, self._size = store, rank, size
        self._interval_s, self._mine = interval_s, mine
        self._count = 0
        self._poked = threading.Event()
        self._closing = False
        self._tasks: list[Callable[[], None]] = []

    def run(self) -> None:
        """Rounds until closed."""
        with self._noting_errors():
            self._store.set(_key("who", self._rank), json.dumps(astuple(Identity.mine())))
        while True:
            closing = self._closing
            with self._noting_errors():
                self._round()
            if closing:
                return
            self._poked.wait(self._interval_s)
            self._poked.clear()

    def poke(self) -> None:
        """Begin a round now."""
        self._poked.set()

    def close(self, timeout_s: float) -> None:
        """One last round, then end."""
        self._closing = True
        self.poke()
        self.join(timeout_s)

    def ask_stop(self, signal_name: str) -> None:
        """Tell all ranks that the run is to stop; the first signal's name stays."""
        self._later(lambda: self._first("stop", signal_name))

    def tell_saved(self) -> None:
        """Tell all ranks that the result is on disk."""
        self._later(lambda: self._store.set("watch/saved", "1"))

    def publish(self, verdict: Verdict) -> None:
        """Offer a verdict to all ranks; the first one stands, also here."""
        text = json.dumps({"cause": asdict(verdict.cause), "exit_code": verdict.exit_code})
        self._later(lambda: self._first("verdict", text))

    def _later(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self.poke()

    def _first(self, name: str, text: str) -> None:
        if self._store.add(f"watch/{name}/count", 1) == 1:
            self._store.set(f"watch/{name}", text)

    def _round(self) -> None:
        started = time.monotonic()
        while self._tasks:
            self._tasks.pop(0)()
        self._count += 1
        self._store.set(_key("beat", self._rank), json.dumps(astuple(self._mine(self._count))))
        self._hear_news()
        self._hear_ranks()
        self.round_started = started

    def _hear_news(self) -> None:
        if self.verdict is None:
            text = self._read("watch/verdict")
            if text:
                document = json.loads(text)
                self.verdict = Verdict(Cause(**document["cause"]), document["exit_code"])
        if self.stop is None:
            self.stop = self._read("watch/stop")
        self.saved = self.saved or self._read("watch/saved") is not None

    def _hear_ranks(self) -> None:
        for rank in self._followed():
            if rank not in self.identities:
                text = self._read(_key("who", rank))
                if text is None:
                    continue
                self.identities[rank] = Identity(*json.loads(text))
            text = self._read(_key("beat", rank))
            if text is not None:
                self._note(rank, Beat(*json.loads(text)))

    def _note(self, rank: int, beat: Beat) -> None:
        now = time.monotonic()
        before = self.heard.get(rank)
        if before is None:
            self.heard[rank] = Heard(beat, now, now)
        elif beat.count != before.beat.count:
            moved = beat.moves != before.beat.moves or beat.phase != before.beat.phase
            self.heard[rank] = Heard(beat, now, now if moved else before.moved_at)

    def _followed(self) -> Sequence[int]:
        """All ranks while a stop is being agreed, else the next ones in a ring."""
        others = self._size - 1
        count = others if self.stop else min(others, SUCCESSORS)
        return [(self._rank + 1 + offset) % self._size for offset in range(count)]

    def _read(self, key: str) -> str | None:
        """The key's value, None before it is set; asked without waiting for it."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError, ValueError) as error:
            self.error = error
        else:
            self.answered_at, self.error = time.monotonic(), None


def _key(name: str, rank: int) -> str:
    return f"watch/{name}/{rank}"


def forgive(heard: dict[int, Heard], seconds: float) -> dict[int, Heard]:
    """The same, with every time later: this process itself did not run for ``seconds``."""
    return {
        rank: Heard(one.beat, one.beat_at + seconds, one.moved_at + seconds)
        for rank, one in heard.items()
    }
