"""``torchrun ... -m epdecode.doctor.full``: the parts that need every rank, one after the other.

Each part runs in a fresh process per rank: a library that ends its process, hangs, or leaves the
GPU in disorder costs its own row and no other. Rank 0 prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from torch._C._distributed_c10d import PrefixStore, Store

from epdecode.doctor import nvml
from epdecode.doctor.check import Check, Outcome, Verdict, fail, ok
from epdecode.doctor.classify import Role, classify
from epdecode.doctor.parts import PARTS
from epdecode.doctor.render import print_table, to_json, worst
from epdecode.errors import Exit, UserError
from epdecode.launch.env import Launch, read_launch
from epdecode.world import open_store

JOIN_S = 60.0
GRACE_S = 15.0
"""How long ranks wait for the outcome of one that is over its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """This rank's side of the parts."""

    launch: Launch
    store: Store
    logs: Path
    nodes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 3 when a part failed on any rank."""
    options = _options(arguments)
    launch = read_launch(os.environ)
    options.log_folder.mkdir(parents=True, exist_ok=True)
    session = Session(
        launch=launch,
        store=PrefixStore("doctor", open_store(launch, JOIN_S)),
        logs=options.log_folder,
        nodes=-(-launch.world_size // launch.local_world_size),
    )
    gpu = bool(nvml.read().devices)
    checks = [_run_part(session, name, gpu) for name in options.part or PARTS]
    if launch.rank == 0:
        _report(checks, options)
    return Exit.ENVIRONMENT if worst(checks) is Verdict.FAIL else Exit.OK


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="epdecode.doctor.full", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write the JSON to this file and print nothing")
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="only this part; may be repeated"
    )
    parser.add_argument(
        "--log-folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / f"epdecode-doctor-{os.getuid()}",
        help="folder for what each rank of each part printed",
    )
    return parser.parse_args(arguments)


def _report(checks: list[Check], options: argparse.Namespace) -> None:
    if options.out:
        options.out.write_text(to_json(checks))
    elif options.json:
        sys.stdout.write(to_json(checks) + "\n")
    else:
        print_table(checks, Console())


def _run_part(session: Session, name: str, gpu: bool) -> Check:
    """This rank's outcome, exchanged: every rank returns the worst of all ranks."""
    start = time.monotonic()
    part = PARTS[name]
    idle = part.gpu == "required" and not gpu
    mine = ok("not needed: no GPU here") if idle else _child(session, name)
    session.store.set(f"{name}/{session.launch.rank}", json.dumps(asdict(mine)))
    keys = [f"{name}/{rank}" for rank in range(session.launch.world_size)]
    try:
        session.store.wait(keys, timedelta(seconds=part.limit_s + GRACE_S))
    except (RuntimeError, ValueError):
        absent = [key for key in keys if not session.store.check([key])]
        mine = fail(f"no word from {absent}", "every rank's outcome", "see those ranks' nodes")
        return Check(name, mine, time.monotonic() - start)
    outcomes = [_outcome(json.loads(session.store.get(key))) for key in keys]
    return Check(name, worst_outcome(outcomes), time.monotonic() - start)


def worst_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """The first FAIL, else the first WARN, else rank 0's, with its rank where it is no OK."""
    for verdict in (Verdict.FAIL, Verdict.WARN):
        for rank, outcome in enumerate(outcomes):
            if outcome.verdict is verdict:
                saw = outcome.saw
                prefix = "" if saw.startswith("rank ") else f"rank {rank}: "
                return Outcome(verdict, prefix + saw, outcome.want, outcome.fix)
    return outcomes[0]


def _outcome(plain: dict[str, str]) -> Outcome:
    return Outcome(Verdict(plain["verdict"]), plain["saw"], plain["want"], plain["fix"])


def _child(session: Session, name: str) -> Outcome:
    log = session.logs / f"{name}.rank{session.launch.rank}.log"
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "epdecode.doctor.parts", name],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = child.wait(PARTS[name].limit_s)
        except subprocess.TimeoutExpired:
            # A spinning kernel answers to nothing else.
            child.kill()
            child.wait()
            return explain(log, f"no answer in {PARTS[name].limit_s:g} s", session.nodes)
    lines = log.read_text(errors="replace").strip().splitlines()
    try:
        return _outcome(json.loads(lines[-1]))
    except (IndexError, KeyError, TypeError, ValueError):
        return explain(log, f"ended with exit code {code}", session.nodes)


def explain(log: Path, saw: str, nodes: int) -> Outcome:
    """A FAIL for a part that gave no outcome, headed by the log's first known cause."""
    lines = log.read_text(errors="replace").splitlines()
    findings = [each for each in classify(lines, nodes) if each.role is not Role.HARMLESS]
    if findings:
        first = findings[0]
        return fail(f"{saw}; {first.line[:200]} [{log}]", f"not this: {first.cause}", first.remedy)
    last = next((line for line in reversed(lines) if line.strip()), "no output")
    return fail(f"{saw}; last line: {last[:200]}", "an outcome", f"read {log}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"doctor: {error}")
