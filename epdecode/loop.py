"""The timed loop: plain steps for the headline, then instrumented ones for the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from epdecode.build import Runtime
from epdecode.clock import Elapsed
from epdecode.graphs import Step, fill
from epdecode.inputs import Planned
from epdecode.result.samples import Pass

Note = Callable[[Pass, int, float, dict[str, float] | None], None]
"""note(pass, step, microseconds, stages): called for each step when its end has passed."""


Steps = Callable[[], Iterable[int]]
"""The steps of one pass, counted from 0; may end early."""


@dataclass(slots=True)
class Timed:
    """One rank's samples, microseconds; stages are per layer."""

    plain: list[float] = field(default_factory=list)
    instrumented: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    """Tokens of all ranks over the plain steps."""
    load: list[torch.Tensor] = field(default_factory=list)
    """int32 [E] on the host: rows each local expert received, one a layer and instrumented step."""


def timed_steps(
    runtime: Runtime, step: Step, batches: Sequence[Planned], steps: Steps, note: Note
) -> Timed:
    """Both passes. All ranks start each pass together, and end it at the same step.

    Non-finite rows, where they are counted, are looked for in the instrumented pass.
    """
    timed = Timed()
    runtime.world.barrier()
    _plain(runtime, step, batches, steps, note, timed)
    runtime.world.barrier()
    if runtime.tally:
        runtime.tally.reset()
    for index in steps():
        _instrumented(runtime, step, batches[index % len(batches)], index, note, timed)
        if runtime.tally:
            runtime.tally.look(index)
    return timed


def _plain(
    runtime: Runtime,
    step: Step,
    batches: Sequence[Planned],
    steps: Steps,
    note: Note,
    timed: Timed,
) -> None:
    """One step is enqueued while the one before runs: a GPU never waits for the host, whose launch
    would otherwise count as part of the step."""

    def finish(index: int, elapsed: Elapsed) -> None:
        took = elapsed()
        timed.plain.append(took)
        note("plain", index, took, None)

    under_way: tuple[int, Elapsed] | None = None
    for index in steps():
        planned = batches[index % len(batches)]
        fill(step.inputs, planned.batch, planned.bucket)
        elapsed = runtime.clock.time(partial(step, planned.bucket))
        timed.tokens += sum(planned.counts)
        if under_way:
            finish(*under_way)
        under_way = (index, elapsed)
    if under_way:
        finish(*under_way)


def _instrumented(
    runtime: Runtime, step: Step, planned: Planned, index: int, note: Note, timed: Timed
) -> None:
    fill(step.inputs, planned.batch, planned.bucket)
    made = []
    took = runtime.clock.time(lambda: made.append(step.instrumented(planned.bucket)))()
    output, recorder = made[0]
    layers = len(output.traces)
    stages = {stage: us / layers for stage, us in recorder.stages().items()}
    for stage, us in stages.items():
        timed.stages.setdefault(stage, []).append(us)
    timed.load += [trace.counts.cpu() for trace in output.traces]
    timed.instrumented.append(took)
    note("instrumented", index, took, stages)
