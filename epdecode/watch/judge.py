"""The thread that decides whether the run can go on, from beats, processes, signals and a clock."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from epdecode.config import LimitsConfig
from epdecode.errors import Exit
from epdecode.result import Cause
from epdecode.watch.beats import Beat, Beats, Store, Verdict
from epdecode.watch.blame import Seen, find_fault, stale_limit
from epdecode.watch.processes import Identity, started_by_torchrun
from epdecode.watch.progress import PHASES, Progress, main_thread_waits
from epdecode.watch.signals import EXIT_OF, SignalInbox
from epdecode.watch.stop import StopGate

log = logging.getLogger("epdecode.watch")

TICK_S = 0.1
PAUSE_S = 1.0
"""A judge that was away longer (the process was stopped) forgives what it did not see."""
EARLY_STOP_S = 0.7
"""Before the first step a signal ends the run after this long: torchrun sends SIGTERM to the peers
of a rank that died, and the death is then the cause."""
CONFIRM_S = 1.0
"""A peer that is gone may have said why; the store is given this long to tell."""


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank among all; store_rank = the rank whose process serves the store, if one does."""

    rank: int
    size: int
    store_rank: int | None = None


class Judge(threading.Thread):
    """Looks every TICK_S; ``end`` is called with the verdict and whether to save, once."""

    def __init__(
        self, store: Store, seat: Seat, limits: LimitsConfig, inbox: SignalInbox, progress: Progress
    ) -> None:
        super().__init__(name="watch-judge", daemon=True)
        self.seat, self.limits, self.inbox, self.progress = seat, limits, inbox, progress
        self.gate = StopGate()
        self.end: Callable[[Verdict, bool], object] = lambda verdict, save: None
        self.every_tick: Callable[[], None] = lambda: None
        interval = min(0.25, limits.stale_s / 10)
        identity = Identity.mine(progress.handle)
        self.host = identity.host
        self.beats = Beats(store, (seat.rank, seat.size), interval, identity, self._beat)
        self._launcher = os.getppid() if started_by_torchrun() else None
        self._began = time.monotonic()
        self._moved_at, self._moves = self._began, 0
        self._gone_at: dict[int, float] = {}
        self._closing = False

    def start(self) -> None:
        """Start this thread and the one it listens through."""
        self.beats.start()
        super().start()

    def run(self) -> None:
        """Look until closed or until there is a verdict."""
        try:
            self._watch()
        except Exception as error:
            log.exception("the watch broke")
            cause = Cause(
                kind="exception", rank=self.seat.rank, message=f"the watch broke: {error}"
            )
            self.end(Verdict(cause, int(Exit.BUG)), True)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closing:
            self.inbox.wait(TICK_S)
            now = time.monotonic()
            if now - last > TICK_S + PAUSE_S:
                self._forgive(now - last)
            last = now
            self.every_tick()
            verdict = self._look(now)
            if verdict and not self._closing:
                self.end(verdict, not self.inbox.again)
                return

    def close(self) -> None:
        """End both threads; the last beat says that this rank has left."""
        self._closing = True
        self.join()
        self.beats.close(timeout_s=self.limits.stale_s)

    def settle(self, verdict: Verdict) -> Verdict:
        """The verdict all ranks share: the first published one, or this when the store is dead."""
        self.beats.publish(verdict)
        until = time.monotonic() + CONFIRM_S
        while self.beats.verdict is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.beats.verdict or verdict

    def _look(self, now: float) -> Verdict | None:
        if self.beats.verdict:
            return self.beats.verdict
        cause = self._launcher_gone() or find_fault(now, self._seen(now), self.limits)
        cause = cause or self._store_gone(now)
        if cause:
            return self.settle(Verdict(cause, int(Exit.RANK_LOST)))
        return self._heed_signals(now)

    def _beat(self, count: int) -> Beat:
        return Beat(count, self.progress.position(), main_thread_waits(), self.gate.promised)

    def _forgive(self, seconds: float) -> None:
        self.beats.forgive(seconds, self.limits.stale_s)
        self._began += seconds
        self._moved_at += seconds

    def _seen(self, now: float) -> list[Seen]:
        at = self.progress.position()
        if at.moves != self._moves:
            self._moves, self._moved_at = at.moves, now
        idle = now - self._moved_at > self.limits.stale_s
        self.beats.follow_all = idle or at.phase != "steps"
        me = Seen(
            rank=self.seat.rank,
            host=self.host,
            state="running",
            beat_at=now,
            moved_at=self._moved_at,
            at=at,
            waits=main_thread_waits(),
        )
        others = [self._see(rank, now) for rank in self.beats.following]
        return sorted([me, *others], key=lambda one: one.rank)

    def _see(self, rank: int, now: float) -> Seen:
        """Nobody is silent for as long as the store is: its silence does not count."""
        peer, heard = self.beats.peers.get(rank), self.beats.heard.get(rank)
        if peer is None or heard is None:
            return Seen(rank=rank, beat_at=self._began, moved_at=self._began)
        unheard = now - self.beats.answered_at
        state, beat_at = peer.state(), min(now, heard.beat_at + unheard)
        if state == "gone" and not self._confirmed_gone(rank, now):
            state, beat_at = "running", now
        return Seen(
            rank=rank,
            host=peer.identity.host,
            state=state,
            beat_at=beat_at,
            moved_at=heard.moved_at,
            at=peer.progress.position() if peer.progress else heard.beat.at,
            waits=heard.beat.waits,
        )

    def _confirmed_gone(self, rank: int, now: float) -> bool:
        """Its last words, if there were any, have been heard."""
        since = self._gone_at.setdefault(rank, now)
        self.beats.poke()
        heard = self.beats.round_started > since or self.beats.error is not None
        return heard or now - since > CONFIRM_S

    def _launcher_gone(self) -> Cause | None:
        if self._launcher is None or os.getppid() == self._launcher:
            return None
        return Cause(
            kind="launcher_lost",
            host=self.host,
            message=f"the launcher on {self.host} (process {self._launcher}) is gone",
        )

    def _store_gone(self, now: float) -> Cause | None:
        silent = now - self.beats.answered_at
        if silent < stale_limit(self.progress.phase, self.limits):
            return None
        rank, kind = self.seat.store_rank, "store_lost"
        owner = "the launcher" if rank is None else f"rank {rank}"
        if rank is not None:
            peer = self.beats.peers.get(rank)
            kind = "stopped" if peer and peer.state() == "stopped" else "silent"
        why = f": {self.beats.error}" if self.beats.error else ""
        return Cause(
            kind=kind,
            rank=rank,
            message=f"the store, which {owner} serves, has not answered for {silent:.1f} s{why}",
        )

    def _heed_signals(self, now: float) -> Verdict | None:
        number = self.inbox.first
        early = PHASES.index(self.progress.phase) < PHASES.index("steps")
        if number is not None and self.progress.phase != "report":
            if self.inbox.again or (early and now - self.inbox.first_at > EARLY_STOP_S):
                return self.settle(self._stopped_by(number))
            if not early and self.beats.stop is None:
                self.beats.ask_stop(number.name)
        elif number == signal.SIGINT and self.inbox.again:
            return self._stopped_by(number)
        if self.beats.stop:
            self._agree_on_stop()
        return None

    def stop_verdict(self) -> Verdict:
        """Of a loop that ended early because some rank received a signal."""
        return self._stopped_by(signal.Signals[self.beats.stop or "SIGTERM"])

    def _stopped_by(self, number: signal.Signals) -> Verdict:
        at = self.progress
        cause = Cause(
            kind="interrupted" if number == signal.SIGINT else "preempted",
            step=at.step,
            stage=at.phase,
            message=f"{number.name} received; stopped in {at.phase}"
            + ("" if at.step is None else f" after step {at.step}"),
        )
        return Verdict(cause, int(EXIT_OF[number]))

    def _agree_on_stop(self) -> None:
        if self.gate.decided:
            return
        promises: list[int | None] = [self.gate.promise()]
        for rank in range(self.seat.size):
            heard = self.beats.heard.get(rank)
            if rank != self.seat.rank and not (heard and heard.beat.at.phase == "left"):
                promises.append(heard.beat.promise if heard else None)
        known = [promise for promise in promises if promise is not None]
        if len(known) == len(promises):
            self.gate.decide(known)
        self.beats.poke()
