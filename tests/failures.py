"""The faults a run must survive or name: one table for the tests and for docs/failures.md.

``python -m tests.failures > docs/failures.md`` writes the page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """One fault, injected in one of three ranks, and what must come of it."""

    name: str
    fault: str
    """EPDECODE_FAULT."""
    kind: str
    """status.json's cause.kind."""
    exit_code: int
    what: str
    """What happens, for people."""
    seen: str
    """What the user sees."""
    rank: int | None = 1
    stage: str = "down_gemm"
    step: int | None = 3
    within: str = "1 s"
    """Named by every survivor within this time of the fault."""
    within_s: float = 1
    """The same in seconds, with the limits of tests/watched.py."""
    silent_exit: int | None = None
    """Exit code of the faulty rank itself, when it is not the run's."""


DIED = "is gone without a word: killed, crashed or out of host memory"

FAILURES = (
    Failure(
        "killed while joining",
        "kill@1:*:join",
        "died",
        6,
        "SIGKILL, the kernel's out-of-memory killer or a crash, before the group exists",
        DIED,
        stage="join",
        step=None,
        silent_exit=-9,
    ),
    Failure(
        "killed while loading",
        "kill@1:*:load",
        "died",
        6,
        "the same while weights are made or read",
        DIED,
        stage="load",
        step=None,
        silent_exit=-9,
    ),
    Failure(
        "killed in warm-up",
        "kill@1:*:warmup",
        "died",
        6,
        "the same while kernels compile or graphs are captured",
        DIED,
        stage="warmup",
        step=None,
        silent_exit=-9,
    ),
    Failure(
        "killed in a step",
        "kill@1:3:down_gemm",
        "died",
        6,
        "the same in a timed step; samples so far are kept",
        DIED,
        silent_exit=-9,
    ),
    Failure(
        "rank 0 killed",
        "kill@0:3:down_gemm",
        "died",
        6,
        "the rank that writes dies: the lowest survivor writes instead",
        DIED,
        rank=0,
        silent_exit=-9,
    ),
    Failure(
        "killed while reporting",
        "kill@1:*:report",
        "died",
        6,
        "the same after the last step",
        DIED,
        stage="report",
        step=9,
        silent_exit=-9,
    ),
    Failure(
        "segmentation fault",
        "segv@1:3:down_gemm",
        "died",
        6,
        "a native library crashes; its Python stack is in log/rank00001.stacks.txt",
        DIED,
        silent_exit=-11,
    ),
    Failure(
        "stopped",
        "stop@1:3:down_gemm",
        "stopped",
        6,
        "SIGSTOP, a debugger or a suspended container; killed by a survivor of its host",
        "is stopped (SIGSTOP or a debugger)",
        within="limits.stale_s + 1 s",
        within_s=2,
        silent_exit=-9,
    ),
    Failure(
        "asleep",
        "sleep@1:3:down_gemm",
        "stalled",
        6,
        "alive, no progress: an endless loop, a lock, a dead file server",
        "made no progress for limits.step_s",
        within="limits.step_s + 1 s",
        within_s=3,
    ),
    Failure(
        "asleep in warm-up",
        "sleep@1:*:warmup",
        "stalled",
        6,
        "the same while compiling or capturing: only the long clock counts there",
        "made no progress for limits.warmup_s",
        stage="warmup",
        step=None,
        within="limits.warmup_s + 1 s",
        within_s=5,
    ),
    Failure(
        "GIL held",
        "gil@1:3:down_gemm",
        "frozen",
        6,
        "a native call that never returns and lets no Python thread run; its stack is dumped, then "
        "it is killed by a survivor of its host",
        "is alive but none of its threads runs",
        within="limits.stale_s + 1 s",
        within_s=2,
        silent_exit=-9,
    ),
    Failure(
        "exception",
        "raise@1:3:down_gemm",
        "exception",
        1,
        "our bug: the traceback is in the rank's log, its message in status.json on every rank",
        "ArithmeticError: injected",
    ),
    Failure(
        "out of memory",
        "oom@1:3:down_gemm",
        "out_of_memory",
        7,
        "the device's memory ran out; the message says what was asked, free, and what to lower",
        "lower batch.tokens_per_rank",
    ),
    Failure(
        "early exit 0",
        "exit@1:3:down_gemm",
        "exited",
        6,
        "a rank's interpreter ends before the run is over, with whatever code",
        "left before the run was over",
        silent_exit=0,
    ),
    Failure(
        "skipped step",
        "skip@1:3:route",
        "skipped",
        6,
        "a rank leaves a step out: its peers would wait in their last one for ever",
        "left a step or stage out that its peers wait in",
        stage="report",
        step=9,
        within="limits.step_s + 1 s",
        within_s=3,
    ),
    Failure(
        "SIGTERM to one rank",
        "term@1:3:down_gemm",
        "preempted",
        75,
        "SIGTERM or SIGUSR1 (Slurm's notice): all ranks stop after the same step and save",
        "SIGTERM received; stopped in steps",
        rank=None,
        stage="steps",
        step=None,
        within="one step",
    ),
    Failure(
        "SIGINT to one rank",
        "int@1:3:down_gemm",
        "interrupted",
        130,
        "Ctrl-C: likewise; a second one, more than 1 s later, leaves at once",
        "SIGINT received; stopped in steps",
        rank=None,
        stage="steps",
        step=None,
        within="one step",
    ),
)

HEAD = """# What can go wrong, and what is promised then

A run never hangs, never blames a victim and keeps what was measured. Every rank watches all
others (their beat, their progress and, on the same host, their process). When the run cannot go
on, every survivor logs the rank at fault, dumps its Python stacks to `log/rankNNNNN.stacks.txt`,
and leaves; the lowest survivor writes `status.json` and what was measured. Nothing of the run is
left on the host. `epdecode status RUN_DIR` prints the cause and exits with the code: torchrun's
own message often names a victim, and its exit code is always 1.

Each row is a test with three ranks (`tests/watch/test_watch.py`); this page is made from the same
table (`python -m tests.failures`).

| Fault | What happens | Named within | cause.kind | Exit | Message |
|---|---|---|---|---|---|
"""

TAIL = """
More, each with its own test:

- **Memory is short**: `out_of_memory`, 7, whoever ran short: torch, CUDA, cuBLAS, Triton, DeepGEMM,
  DeepEP or the host. The message says what was asked, what is free, who else holds memory where
  the driver tells, the plan part by part, and what to lower. What is free is compared with weights
  and buffer before anything is loaded, and a device too full for a CUDA context is told before the
  ranks meet (`tests/test_oom.py`; each seen on an H200 that another process had filled).
- **A slow rank** is not a fault: the result names fastest and slowest rank and warns when they
  are far apart.
- **The launcher dies** (kill -9 of torchrun): the ranks notice their new parent, save and leave,
  `launcher_lost`, 6.
- **The store's process dies**: its rank is named when a rank served it, else `store_lost`, 6.
- **A rank never comes**: `absent` after `limits.join_s`, 6.
- **Another host is silent** (crash, network): `silent` within `limits.stale_s + 1` s in the
  steps, 6. Before the steps a rank may hold the GIL for long, so there the limit is ten times
  `limits.stale_s`.
- **All ranks hang in a collective**: `stalled` without a rank, with the step and stage they are
  all in, 6.
- **A second signal** leaves at once with the code of the first; within 1 s it counts as the first
  one's echo.
- **Signals before the first step** end the run at once: nothing was measured.
- **The disk is full or read-only**: the result is printed to stdout, no broken file is left, 8.
  Checked before the ranks start work: the folder is made, written and has room, else 3.
- **A kill during a write**: every file is whole, old or new; samples end at a whole line.
- **The whole job is stopped and continued** (Ctrl-Z, a suspended laptop): nobody is blamed for
  the pause.

The two clocks: until the barrier that ends warm-up `limits.warmup_s` counts, so that one rank may
compile for minutes while its peers wait; in the timed steps `limits.step_s`.

Faults for tests: `debug.faults: true` in the config and `EPDECODE_FAULT=kind@rank:step:stage`,
for example `EPDECODE_FAULT=kill@1:3:route`; kinds: kill, stop, segv, sleep, gil, raise, oom,
exit, skip, slow, term, int.
"""


def page() -> str:
    """docs/failures.md."""
    rows = [
        f"| {one.name} | {one.what} | {one.within} | `{one.kind}` | {one.exit_code} | {one.seen} |"
        for one in FAILURES
    ]
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    sys.stdout.write(page())
