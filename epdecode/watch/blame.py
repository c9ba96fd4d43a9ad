"""Who is at fault, judged from what one rank sees of all of them. Pure: no clock, no store.

Liveness is a beat that goes on; progress is a move that happened. A rank that waits for a peer is
alive and makes no progress, so of all ranks without progress the least advanced one is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epdecode.config import LimitsConfig
from epdecode.result import Cause
from epdecode.watch.processes import State
from epdecode.watch.progress import PASS_END, PHASES, START, PhaseName, Position

SLOW_PHASE_STALE = 10.0
"""Outside the timed steps a rank may hold the GIL this many times stale_s: it loads libraries,
compiles and captures in calls that do not let the publishing thread run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rank as this rank sees it; times are of this rank's monotonic clock, seconds."""

    rank: int
    host: str | None = None
    """None = it has not come yet."""
    state: State = "elsewhere"
    beat_at: float
    """When its beat last changed."""
    moved_at: float
    """When its progress last changed."""
    at: Position = START
    waits: bool = False
    """It waits for its peers, as far as its Python stack shows."""

    @property
    def advance(self) -> tuple[int, int, int, bool]:
        """How far it is, comparable between ranks that all do the same."""
        phase, steps = PHASES.index(self.at.phase), PHASES.index("steps")
        return (min(phase, steps), self.at.ticks, phase, self.waits)


def find_fault(now: float, seen: Sequence[Seen], limits: LimitsConfig) -> Cause | None:
    """The first fault there is evidence for, the strongest evidence first."""
    present = [one for one in seen if one.at.phase != "left"]
    for look in (_died, _stopped, _silent, _absent):
        cause = look(now, present, limits)
        if cause:
            return cause
    return _stalled(now, seen, limits)


def stale_limit(phase: PhaseName, limits: LimitsConfig) -> float:
    """Seconds without a beat until a rank counts as not alive."""
    return limits.stale_s * (1 if phase == "steps" else SLOW_PHASE_STALE)


def progress_limit(phase: PhaseName, limits: LimitsConfig) -> float:
    """Seconds without progress until a rank counts as stalled: two clocks, and one for joining."""
    if phase == "join":
        return limits.join_s
    return limits.step_s if phase == "steps" else limits.warmup_s


def _died(now: float, seen: Sequence[Seen], limits: LimitsConfig) -> Cause | None:
    gone = [one for one in seen if one.state == "gone"]
    return _cause("died", gone, "is gone without a word: killed, crashed or out of host memory")


def _stopped(now: float, seen: Sequence[Seen], limits: LimitsConfig) -> Cause | None:
    stopped = [one for one in seen if one.state == "stopped" and now - one.beat_at > limits.stale_s]
    return _cause("stopped", stopped, "is stopped (SIGSTOP or a debugger)")


def _silent(now: float, seen: Sequence[Seen], limits: LimitsConfig) -> Cause | None:
    late = [
        one
        for one in seen
        if one.host is not None and now - one.beat_at > stale_limit(one.at.phase, limits)
    ]
    frozen = [one for one in late if one.state == "running"]
    elsewhere = [one for one in late if one.state == "elsewhere"]
    return _cause(
        "frozen", frozen, "is alive but none of its threads runs: a call holds the GIL"
    ) or _cause("silent", elsewhere, "has not been heard of: its process, host or network is down")


def _absent(now: float, seen: Sequence[Seen], limits: LimitsConfig) -> Cause | None:
    absent = [one for one in seen if one.host is None and now - one.beat_at > limits.join_s]
    return _cause("absent", absent, f"did not come within limits.join_s = {limits.join_s:g} s")


def _stalled(now: float, seen: Sequence[Seen], limits: LimitsConfig) -> Cause | None:
    stuck = [one for one in seen if now - one.moved_at > progress_limit(one.at.phase, limits)]
    behind = [one for one in seen if one.advance == min(other.advance for other in seen)]
    first, furthest = behind[0], max(seen, key=lambda one: one.advance)
    if not stuck:
        return None
    if _went_past(first.at, furthest.at):
        return _cause("skipped", behind, "left a step or stage out that its peers wait in")
    if first not in stuck:
        return None
    limit = progress_limit(first.at.phase, limits)
    if len(behind) == len(seen) > 1:
        return Cause(
            kind="stalled",
            step=first.at.step,
            stage=_stage(first),
            message=f"no rank made progress for {limit:g} s, all of them {_place(first)}: "
            f"the transport or the network hangs",
        )
    return _cause("stalled", behind, f"made no progress for {limit:g} s")


def _went_past(least: Position, furthest: Position) -> bool:
    """The rank with the fewest stages behind it has come to the end of what others are still in."""
    if least.phase == furthest.phase == "steps":
        same_pass = (furthest.step or 0) >= (least.step or 0)
        return least.stage == PASS_END and same_pass and least.ticks < furthest.ticks
    return PHASES.index(least.phase) > PHASES.index(furthest.phase)


def _cause(kind: str, ranks: Sequence[Seen], what: str) -> Cause | None:
    if not ranks:
        return None
    one = ranks[0]
    also = f"; so are ranks {[other.rank for other in ranks[1:]]}" if len(ranks) > 1 else ""
    return Cause(
        kind=kind,
        rank=one.rank,
        host=one.host,
        step=one.at.step,
        stage=_stage(one),
        message=f"rank {one.rank} on {one.host or 'an unknown host'} {what} ({_place(one)}){also}",
    )


def _stage(one: Seen) -> str:
    return one.at.stage if one.at.phase == "steps" and one.at.stage else one.at.phase


def _place(one: Seen) -> str:
    if _stage(one) == PASS_END:
        return f"after step {one.at.step}, the last of a pass"
    return (
        f"in step {one.at.step}, stage {_stage(one)}"
        if one.at.phase == "steps"
        else f"in {one.at.phase}"
    )
