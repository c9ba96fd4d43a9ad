"""Liveness and progress of all ranks: a run never hangs, and names the rank at fault.

    with SignalInbox() as inbox:                       # main thread
        watch = Watch(store.clone(), Seat(rank, size), config.limits, inbox)
        try:
            watch.phase("load")                        # join, load, warmup, steps, report
            watch.use(folder, on_loss=save_partial)    # once there is a run folder
            watch.keep(samples.flush)
            watch.phase("steps")                       # after the barrier that ends warm-up
            for step in watch.steps(100):              # ends early when a signal asks for it
                watch.progress(step, "route")          # on entering a stage, or mark=watch.mark
            watch.phase("report")
            watch.close(exit_code)                     # watch.stop: a signal ended the loop
        except Exception as error:
            watch.fail(error)                          # does not return

All ranks must enter the same stages in the same order: the least advanced one is blamed. Two
threads: Beats publishes and listens, Judge decides. When the run cannot go on the judge ends the
process itself (leave.py), since the main thread may be in a call that never returns.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from epdecode.config import LimitsConfig
from epdecode.errors import (
    ConfigError,
    EnvironmentFault,
    Exit,
    NotSaved,
    OutOfMemory,
    UserError,
)
from epdecode.result import STAGES, Cause
from epdecode.result.save import RunFolder
from epdecode.result.status import REFRESH_S, Phase, Status, write_status
from epdecode.watch.beats import Store, Verdict
from epdecode.watch.faults import NO_FAULT, Fault
from epdecode.watch.judge import Judge, Seat
from epdecode.watch.leave import Leaver
from epdecode.watch.progress import PASS_END, PhaseName, Progress
from epdecode.watch.signals import SignalInbox

log = logging.getLogger("epdecode.watch")

SAVED_S = 60.0
"""The other ranks wait this long for rank 0 to save before they leave: torchrun ends all ranks as
soon as one has left with an error."""
STATUS_S = 1.0
"""A status that is being written when the run ends is given this long."""
FOLLOWING = {
    **{stage: STAGES[(index + 1) % len(STAGES)] for index, stage in enumerate(STAGES)},
    "down_gemm": "combine_send",  # expert_chain is in the three stages' place, not after them
}
KINDS: dict[type[UserError], str] = {
    ConfigError: "config",
    EnvironmentFault: "environment",
    OutOfMemory: "out_of_memory",
    NotSaved: "not_saved",
}


class Watch:
    """One rank's watch, of itself and of the others."""

    def __init__(
        self,
        store: Store,
        seat: Seat,
        limits: LimitsConfig,
        inbox: SignalInbox,
        fault: Fault = NO_FAULT,
    ) -> None:
        """store: a client of its own (clone()), since a waiting client blocks its other users."""
        self._seat, self._limits, self._inbox, self._fault = seat, limits, inbox, fault
        self.stop: Verdict | None = None
        """Why the steps ended early: preempted 75, interrupted 130."""
        self._at = Progress()
        self._leaver = Leaver(seat.rank, seat.size)
        self._judge = Judge(store, seat, limits, inbox, self._at)
        self._judge.end = self._end
        self._judge.every_tick = self._refresh
        self._refreshed = 0.0
        self._ending = threading.Lock()
        self._writing = threading.Lock()
        self._closed = False
        atexit.register(self._left_early)
        self._judge.start()

    def use(self, folder: RunFolder, on_loss: Callable[[Verdict], None] | None = None) -> None:
        """Write status and stacks there. on_loss saves what was measured, without collectives, on
        the one rank that writes: 0, or the lowest survivor."""
        self._leaver.on_loss = on_loss
        self._leaver.use(folder)
        self._write_status()

    def keep(self, flush: Callable[[], None]) -> None:
        """Have every rank call ``flush`` before it leaves a run that broke."""
        self._leaver.keep.append(flush)

    def phase(self, name: PhaseName) -> None:
        """Enter a phase. Entering "steps", right after a barrier, starts the short clock."""
        at = self._at
        if name in ("load", "warmup", "steps"):
            at.ticks = 0
        at.phase, at.stage = name, None
        at.moved()
        if name == "steps":
            self._judge.beats.all_alive()
        self._judge.beats.heard_since(time.monotonic(), self._limits.stale_s)
        self._write_status()
        self._fault.hit(self._seat.rank, at.step, name)

    def progress(self, step: int, stage: str) -> None:
        """The main thread enters ``stage`` of ``step``."""
        at = self._at
        at.step, at.stage = step, stage
        if at.phase != "report":
            at.ticks += 1
        at.moved()
        self._fault.hit(self._seat.rank, step, stage)

    def mark(self, stage: str) -> None:
        """A ``Mark``: ``stage`` is over, so its follower in a layer begins."""
        self.progress(self._at.step or 0, FOLLOWING[stage])

    def steps(self, count: int) -> Iterator[int]:
        """0, 1 ... count - 1; ends early, on all ranks at the same step, when a signal asks."""
        for step in range(count):
            if not self._judge.gate.may_begin():
                self.stop = self._judge.stop_verdict()
                return
            if self._fault.skips(self._seat.rank, step):
                continue
            self.progress(step, STAGES[0])
            yield step
        # No tick: a rank that left a step out is told by having fewer of them than its peers.
        self._at.stage = PASS_END
        self._at.moved()

    def close(self, exit_code: int = Exit.OK, cause: Cause | None = None) -> None:
        """The run is over and rank 0 has saved it. Waits for rank 0's word, so that no rank's exit
        makes a launcher end rank 0 before."""
        self._closed = True
        if self._seat.rank == 0:
            self._write_status(
                Status(
                    phase="done",
                    step=self._at.step,
                    exit_code=int(exit_code),
                    cause=cause,
                    stopped_by=0,
                )
            )
            self._judge.beats.tell_saved()
        else:
            self._wait(lambda: self._judge.beats.saved or self._rank_0_gone(), SAVED_S)
        self._at.phase = "left"
        self._at.moved()
        if self._seat.rank == self._seat.store_rank:
            self._wait(self._all_left, self._limits.stale_s)
        self._judge.close()
        self._leaver.close()
        self._at.close()
        atexit.unregister(self._left_early)

    def fail(self, error: BaseException) -> NoReturn:
        """Leave because of ``error``, or because of the rank that caused it. Every rank follows.

        A broken collective is most often a peer's death: it is given time to be noticed, and then
        the judge ends this process with that rank's name.
        """
        if isinstance(error, RuntimeError | OSError):
            log.warning("%s: %s; looking for a lost rank", type(error).__name__, error)
            time.sleep(self._limits.stale_s + 1)
        if isinstance(error, UserError):
            log.error("%s", error)
        else:
            log.error("rank %d failed", self._seat.rank, exc_info=error)
        self._end(self._judge.settle(self._own_verdict(error)), save=True)
        raise AssertionError("leaving does not return")

    def _own_verdict(self, error: BaseException) -> Verdict:
        own = isinstance(error, UserError)
        kind = next((k for cls, k in KINDS.items() if isinstance(error, cls)), "exception")
        what = str(error) if own else f"{type(error).__name__}: {error}"
        cause = Cause(
            kind=kind,
            rank=self._seat.rank,
            host=self._judge.host,
            step=self._at.step,
            stage=self._at.stage if self._at.phase == "steps" else self._at.phase,
            message=f"rank {self._seat.rank}: {what}",
        )
        return Verdict(cause, int(error.exit_code if isinstance(error, UserError) else Exit.BUG))

    def _end(self, verdict: Verdict, save: bool) -> None:
        if not self._ending.acquire(blocking=False):
            time.sleep(3600)
        # The main thread may be writing; from now on it writes no more.
        self._writing.acquire(timeout=STATUS_S)
        status = Status(
            phase=self._phase(),
            step=self._at.step,
            exit_code=verdict.exit_code,
            cause=verdict.cause,
            stopped_by=self._seat.rank,
        )
        self._leaver.leave(verdict, status, self._judge.beats.peers, save)

    def _left_early(self) -> None:
        """The interpreter ends before close(): say so, or peers would wait."""
        cause = Cause(
            kind="exited",
            rank=self._seat.rank,
            host=self._judge.host,
            step=self._at.step,
            stage=self._at.stage if self._at.phase == "steps" else self._at.phase,
            message=f"rank {self._seat.rank} left before the run was over",
        )
        self._judge.settle(Verdict(cause, int(Exit.RANK_LOST)))

    def _phase(self) -> Phase:
        return "done" if self._at.phase == "left" else self._at.phase

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed > REFRESH_S and not self._closed:
            self._write_status()

    def _write_status(self, status: Status | None = None) -> None:
        """Rank 0 keeps status.json; a full disk must not end a run."""
        self._refreshed = time.monotonic()
        if self._seat.rank != 0 or self._leaver.folder is None:
            return
        status = status or Status(phase=self._phase(), step=self._at.step)
        path, ends = self._leaver.folder.status, status.exit_code is not None
        with self._writing:
            try:
                write_status(path, status, durable=ends)
            except OSError as error:
                log.warning("%s: not written: %s", path, error)

    def _wait(self, over: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not over() and time.monotonic() < until:
            self._judge.beats.poke()
            time.sleep(0.02)

    def _rank_0_gone(self) -> bool:
        peer = self._judge.beats.peers.get(0)
        return (peer is not None and peer.state() == "gone") or self._judge.beats.error is not None

    def _all_left(self) -> bool:
        heard = self._judge.beats.heard
        return all(one.beat.at.phase == "left" for one in heard.values())
