"""The result of a run that could not end: whatever its samples on disk hold, and the cause."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TextIO

from epdecode.errors import Exit
from epdecode.result import Result, StepCounts
from epdecode.result.document import summary_line, to_json, withhold_speed
from epdecode.result.samples import read_samples
from epdecode.result.save import RunFolder, save_result, utc_now
from epdecode.result.timing import build_timing
from epdecode.watch.beats import Verdict

INTERRUPTED = (Exit.PREEMPTED, Exit.INTERRUPTED)


def save_lost(
    folder: RunFolder, blank: Result, verdict: Verdict, stdout: TextIO | None = None
) -> None:
    """Write result.json from the samples that every rank has put on disk, then the last line.

    blank: the run's result without figures, made when it began. Needs no other rank. The parts of
    samples.jsonl stay as they are: a surviving rank may still be adding to its own. Raises
    NotSaved, after printing the result, when the disk takes nothing any more.
    """
    stream = stdout or sys.stdout
    result = _with_samples(folder, blank)
    result = replace(
        result,
        status="interrupted" if verdict.exit_code in INTERRUPTED else "failed",
        cause=verdict.cause,
        provenance=replace(blank.provenance, finished_utc=utc_now()),
    )
    try:
        save_result(folder, to_json(result), stream)
    finally:
        saved = folder.result if folder.result.exists() else None
        stream.write(summary_line(result, saved, verdict.exit_code) + "\n")
        stream.flush()


def _with_samples(folder: RunFolder, blank: Result) -> Result:
    plain: dict[int, list[float]] = {}
    instrumented: dict[int, list[float]] = {}
    stages: dict[int, dict[str, list[float]]] = {}
    for sample in read_samples(folder):
        rank = int(sample["rank"])
        if sample["pass"] == "plain":
            plain.setdefault(rank, []).append(float(sample["us"]))
        elif sample["pass"] == "instrumented":
            instrumented.setdefault(rank, []).append(float(sample["us"]))
            for stage, us in sample.get("stages", {}).items():
                stages.setdefault(rank, {}).setdefault(stage, []).append(float(us))
    silent = sorted(set(range(blank.method.world_size)) - set(plain))
    if silent:
        blank = replace(blank, warnings=(*blank.warnings, f"no samples of rank(s) {silent}"))
    if not plain:
        return blank
    done = min(map(len, plain.values())) + min(map(len, instrumented.values()), default=0)
    graph = done if blank.method.graph else 0
    result = replace(
        blank,
        timing=build_timing(plain, blank.method.layers, instrumented, stages),
        step_counts=StepCounts(graph=graph, eager=done - graph, skipped=0),
    )
    return withhold_speed(result) if blank.method.shared_gpu else result
