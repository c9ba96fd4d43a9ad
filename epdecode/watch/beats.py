"""The thread that tells the other ranks where this one is, and hears where they are.

It alone talks to the store, through a client of its own, so that neither a blocked main thread nor
a dead store keeps the judging thread from judging.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Protocol

from epdecode.result import Cause
from epdecode.watch.processes import Identity, Peer
from epdecode.watch.progress import Position

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
    at: Position
    waits: bool
    """Its main thread is in a collective or waits for the GPU."""
    promise: int | None
    """Steps begun when a stop was asked; it begins no more until all have said theirs."""

    @classmethod
    def read(cls, text: str) -> Beat:
        """From the store."""
        count, at, waits, promise = json.loads(text)
        return cls(count, Position(*at), waits, promise)


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
        self,
        store: Store,
        place: tuple[int, int],
        interval_s: float,
        identity: Identity,
        mine: Callable[[int], Beat],
    ) -> None:
        """place: this rank and the number of ranks."""
        super().__init__(name="watch-beats", daemon=True)
        self.heard: dict[int, Heard] = {}
        self.peers: dict[int, Peer] = {}
        self.verdict: Verdict | None = None
        self.stop: str | None = None
        self.saved = False
        self.following: tuple[int, ...] = ()
        """Ranks heard in the latest round."""
        self.follow_all = True
        self.round_started = 0.0
        """When the latest complete round began: what was published before then has been heard."""
        self.answered_at = time.monotonic()
        self.error: Exception | None = None
        self._store, (self._rank, self._size) = store, place
        self._identity = identity
        self._interval_s, self._mine = interval_s, mine
        self._count = 0
        self._poked = threading.Event()
        self._closing = False
        self._broken = False
        self._tasks: list[Callable[[], None]] = []

    def run(self) -> None:
        """Rounds until closed."""
        with self._noting_errors():
            self._store.set(_key("who", self._rank), json.dumps(astuple(self._identity)))
        while not self._broken:
            closing = self._closing
            with self._noting_errors():
                self._round()
            if closing:
                return
            self._poked.wait(self._interval_s)
            self._poked.clear()

    def forgive(self, seconds: float, grace_s: float) -> None:
        """Shift what was heard: this process itself did not run for ``seconds``.

        grace_s: where the whole job was suspended, the others may run again later than this one.
        """
        # Not past now: what was heard meanwhile needs no shift, and the judge adds the time since
        # the store's latest answer to that of a beat, so one in the future makes ranks look silent.
        now = time.monotonic()
        self.answered_at = min(now, self.answered_at + seconds)
        for rank, one in list(self.heard.items()):
            beat_at, moved_at = (min(now, at + seconds) for at in (one.beat_at, one.moved_at))
            self.heard[rank] = Heard(one.beat, beat_at + grace_s, moved_at + grace_s)

    def all_alive(self) -> None:
        """Every rank has just been in one collective with this one: none was silent until now."""
        now = time.monotonic()
        for rank, one in list(self.heard.items()):
            self.heard[rank] = Heard(one.beat, max(now, one.beat_at), max(now, one.moved_at))

    def poke(self) -> None:
        """Begin a round now."""
        self._poked.set()

    def heard_since(self, moment: float, timeout_s: float) -> None:
        """Wait for a round that began after ``moment`` (monotonic), at most ``timeout_s``."""
        while self.round_started < moment and time.monotonic() < moment + timeout_s:
            self.poke()
            time.sleep(0.002)

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
        followed = self._followed()
        for rank in followed:
            if rank not in self.peers:
                text = self._read(_key("who", rank))
                if text is None:
                    continue
                self.peers[rank] = Peer(Identity(*json.loads(text)))
            text = self._read(_key("beat", rank))
            if text is not None:
                self._note(rank, Beat.read(text))
        self.following = followed

    def _note(self, rank: int, beat: Beat) -> None:
        now = time.monotonic()
        before = self.heard.get(rank)
        if before is None or rank not in self.following:
            self.heard[rank] = Heard(beat, now, now)
        elif beat.count != before.beat.count:
            moved = beat.at.moves != before.beat.at.moves
            self.heard[rank] = Heard(beat, now, now if moved else before.moved_at)

    def _followed(self) -> tuple[int, ...]:
        """The next ranks in a ring, or all others."""
        others = self._size - 1
        count = others if self.follow_all or self.stop else min(others, SUCCESSORS)
        return tuple((self._rank + 1 + offset) % self._size for offset in range(count))

    def _read(self, key: str) -> str | None:
        """The key's value, None before it is set; asked without waiting for it."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError, ValueError) as error:
            self.error = error
            # A client does not connect again, and torch logs a stack for every further call.
            self._broken = type(error).__name__ == "DistNetworkError"
        else:
            self.answered_at, self.error = time.monotonic(), None


def _key(name: str, rank: int) -> str:
    return f"watch/{name}/{rank}"
