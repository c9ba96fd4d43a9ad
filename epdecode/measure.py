"""Compile, warm, capture, time, verify: every rank passes each point before any goes on."""

from __future__ import annotations

from functools import partial

from epdecode.build import Runtime
from epdecode.inputs import make_batches
from epdecode.jit_cache import compile_on_one_rank_first
from epdecode.loop import timed_steps
from epdecode.outcome import Measured
from epdecode.result.samples import SampleWriter
from epdecode.result.save import RunFolder
from epdecode.routing.record import TRACE, record_routes
from epdecode.session import Setup
from epdecode.verify import verify_step
from epdecode.warmup import compile_all, warm_up
from epdecode.watch import Watch

VERIFIED = 4
"""Batches whose every layer and row is compared with the plain path."""


def measure(
    setup: Setup, runtime: Runtime, samples: SampleWriter, watch: Watch, folder: RunFolder
) -> Measured:
    """What this rank brings home; without stages and verification when a signal ended the steps."""
    run, world = setup.config.run, runtime.world
    batches = make_batches(setup.config, runtime.plan, world, runtime.recorded)
    watch.phase("warmup")
    _compile(setup, runtime)
    world.barrier()
    first = warm_up(runtime, runtime.eager(), batches, max(1, run.warmup_steps // 2))
    step = runtime.step(watch.mark)
    world.barrier()
    warm_up(runtime, step, batches, run.warmup_steps)
    world.barrier()
    watch.phase("steps")
    timed = timed_steps(runtime, step, batches, lambda: watch.steps(run.steps), samples.add)
    watch.phase("report")
    verification = None
    if run.verify and not watch.stop:
        verification = verify_step(runtime, step, batches[:VERIFIED])
    if run.record_routing and not watch.stop:
        record_routes(runtime, step, batches, folder.path / TRACE)
    return Measured(timed, step.kind, first, verification)


def _compile(setup: Setup, runtime: Runtime) -> None:
    """One rank of each node fills the cache of compiled kernels, the others find them there."""
    compile_here = partial(compile_all, runtime)
    if setup.cache is None:
        compile_here()
    else:
        key = f"{setup.digest[:16]}-{runtime.world.size}"
        compile_on_one_rank_first(setup.cache, key, compile_here)
