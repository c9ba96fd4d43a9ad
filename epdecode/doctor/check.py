"""What a check is and how one runs: alone, within a time limit, whatever it raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Context = TypeVar("Context")


class Verdict(StrEnum):
    """OK: as wanted. WARN: works, or may work, but worse. FAIL: the job cannot run."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check found. ``want`` and ``fix`` are empty where nothing is to be done."""

    verdict: Verdict
    saw: str
    want: str = ""
    fix: str = ""


def ok(saw: str) -> Outcome:
    """All as wanted."""
    return Outcome(Verdict.OK, saw)


def warn(saw: str, want: str, fix: str) -> Outcome:
    """Worse than it could be."""
    return Outcome(Verdict.WARN, saw, want, fix)


def fail(saw: str, want: str, fix: str) -> Outcome:
    """The job cannot run like this."""
    return Outcome(Verdict.FAIL, saw, want, fix)


@dataclass(frozen=True, slots=True)
class Check:
    """A finished check: one row of the report."""

    id: str
    outcome: Outcome
    seconds: float


def run_checks(
    checks: Mapping[str, Callable[[Context], Outcome]], context: Context, limit_s: float
) -> list[Check]:
    """Every check in its own thread, in the table's order; none can stop or delay another.

    A check that raises or outlasts ``limit_s`` is a FAIL of its own row. Threads, because checks
    wait for processes and files; daemons, because a hung mount cannot be interrupted.
    """
    done: dict[str, Check] = {}

    def run(name: str, check: Callable[[Context], Outcome]) -> None:
        start = time.monotonic()
        outcome = _guarded(check, context)
        done[name] = Check(name, outcome, time.monotonic() - start)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    # A check that finishes from here on is late all the same.
    finished = dict(done)
    return [finished.get(name) or Check(name, _late(limit_s), limit_s) for name in checks]


def _guarded(check: Callable[[Context], Outcome], context: Context) -> Outcome:
    try:
        return check(context)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong belongs in this row
        return fail(
            f"the check itself failed: {type(error).__name__}: {error}",
            "an answer",
            "look at the named file, library or program; `epdecode env` belongs in a bug report",
        )


def _late(limit_s: float) -> Outcome:
    return fail(
        f"no answer in {limit_s:g} s",
        f"an answer in {limit_s:g} s",
        "a hung driver or network file system? See `dmesg` and `mount`",
    )
