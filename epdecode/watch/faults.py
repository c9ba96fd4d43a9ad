"""Faults on purpose, for tests: ``EPDECODE_FAULT=kind@rank:step:stage`` and ``debug.faults: true``.

step may be ``*`` (the first time the stage is entered); outside the steps the stage is the phase:
``kill@1:*:load``.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from epdecode.errors import ConfigError, OutOfMemory, nearest

VARIABLE = "EPDECODE_FAULT"
FOR_EVER_S = 3600
SLOW_S = 0.05


@dataclass(slots=True)
class Fault:
    """One fault of one rank; ``hit`` is called wherever the watch hears of progress."""

    kind: str
    rank: int
    step: int | None
    stage: str
    done: bool = False

    def hit(self, rank: int, step: int | None, stage: str) -> None:
        """Do it, once, where it belongs (``slow``: from there on at every call)."""
        if self.done or rank != self.rank or self.kind == "skip":
            return
        if stage != self.stage or (self.step is not None and step is not None and step < self.step):
            return
        self.done = self.kind != "slow"
        FAULTS[self.kind]()

    def skips(self, rank: int, step: int) -> bool:
        """This rank is to leave this step out."""
        return (self.kind, self.rank, self.step) == ("skip", rank, step)


NO_FAULT = Fault("none", rank=-1, step=None, stage="", done=True)


def read_fault(env: Mapping[str, str], enabled: bool) -> Fault:
    """The fault that ``env`` asks for. Raises ConfigError unless debug.faults allows faults."""
    text = env.get(VARIABLE, "")
    if not text:
        return NO_FAULT
    if not enabled:
        raise ConfigError(f"{VARIABLE}={text!r} is set but debug.faults is false: unset it")
    match = re.fullmatch(r"(\w+)@(\d+):(\d+|\*):(\w+)", text)
    if not match:
        raise ConfigError(f"{VARIABLE}={text!r}: accepted: kind@rank:step:stage, step may be *")
    kind, rank, step, stage = match.groups()
    if kind not in FAULTS:
        raise ConfigError(
            f"{VARIABLE}: kind {kind!r}, accepted: {', '.join(FAULTS)}{nearest(kind, FAULTS)}"
        )
    return Fault(kind, int(rank), None if step == "*" else int(step), stage)


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _hold_gil() -> None:
    sum(range(10**14))  # in C, without a look at signals or waiting threads; hours


def _raise() -> None:
    raise ArithmeticError("injected")


def _exit_early() -> None:
    atexit._run_exitfuncs()
    os._exit(0)


def _out_of_memory() -> None:
    raise OutOfMemory("injected: asked 1 GiB, free 0; lower batch.tokens_per_rank")


FAULTS: dict[str, Callable[[], None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "segv": _signal(signal.SIGSEGV),
    "term": _signal(signal.SIGTERM),
    "int": _signal(signal.SIGINT),
    "sleep": lambda: time.sleep(FOR_EVER_S),
    "gil": _hold_gil,
    "raise": _raise,
    "exit": _exit_early,
    "oom": _out_of_memory,
    "slow": lambda: time.sleep(SLOW_S),
    "skip": lambda: None,
}
