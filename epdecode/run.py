"""The main job, one process per rank: load, join, plan, build, run, report.

torchrun --nproc-per-node 8 -m epdecode.run --config configs/X.yaml [a.b=value ...]
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from epdecode import logs, world
from epdecode.build import Runtime, build
from epdecode.config_load import find_preset, resolved_yaml
from epdecode.errors import Exit, UserError
from epdecode.inputs import make_batches
from epdecode.launch_env import Launch, read_launch
from epdecode.loop import timed_steps
from epdecode.outcome import Measured, make_result
from epdecode.plan import render
from epdecode.report.console import print_report
from epdecode.result import Result
from epdecode.result_json import EXIT_OF, summary_line, to_json
from epdecode.samples import SampleWriter, merge_samples
from epdecode.save import RunFolder, atomic_write, save_result, utc_now
from epdecode.session import Setup, join, prepare
from epdecode.status import Status, write_status
from epdecode.verify import verify_step
from epdecode.warmup import compile_all, warm_up

log = logging.getLogger("epdecode.run")

VERIFIED = 4
"""Batches whose every layer and row is compared with the plain path."""
PRINTING_S = 2.0
"""torchrun ends all ranks when one leaves with an error; the one that prints gets this long."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on this rank; the exit code of errors.Exit."""
    args = _parse(argv)
    launch = Launch()
    try:
        launch = read_launch(os.environ)
        logs.to_stderr(launch.rank)
        setup = prepare(args.config, args.override)
    except UserError as error:
        return _refuse(error, launch)
    if args.print_config:
        sys.stdout.write(resolved_yaml(setup.config, args.config) if launch.rank == 0 else "")
        return Exit.OK
    try:
        return _job(args, setup)
    except UserError as error:
        return _complain(error)
    finally:
        world.leave()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m epdecode.run",
        description="Time the decode MoE layer under expert parallelism, and check its numbers.",
        epilog="example: torchrun --nproc-per-node 2 -m epdecode.run "
        "--config configs/cpu-tiny.yaml run.steps=50 batch.tokens_per_rank=8",
    )
    parser.add_argument("--config", help="a YAML file or the name of a preset (default: cpu-tiny)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of run folders")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved config and stop"
    )
    parser.add_argument("override", nargs="*", metavar="a.b=value", help="overrides of the config")
    return parser.parse_intermixed_args(argv)


def _job(args: argparse.Namespace, setup: Setup) -> int:
    started = utc_now()
    ranks = join(setup)
    name = find_preset(args.config).stem
    folder = _open_folder(args.out, name, setup, ranks)
    logs.to_file(folder.log, ranks.rank)
    log.info("%s\n%s", folder.path, render(setup.plan))
    runtime = build(setup.config, setup.plan, ranks, setup.checkpoint)
    measured = _measure(setup, runtime, folder, started)
    result = make_result(name, setup, runtime, measured)
    code = _report(result, folder, ranks)
    runtime.close()
    return code


def _open_folder(root: Path, name: str, setup: Setup, ranks: world.World) -> RunFolder:
    """Rank 0 makes the folder before anyone starts work; the others join it."""
    made = RunFolder.create(root, name, setup.digest) if ranks.rank == 0 else None
    path = Path(ranks.gather_text(str(made.path) if made else "")[0])
    folder = made or RunFolder.join(path)
    if made:
        atomic_write(folder.config, resolved_yaml(setup.config))
        write_status(folder.status, Status(phase="load"))
    return folder


def _measure(setup: Setup, runtime: Runtime, folder: RunFolder, started: str) -> Measured:
    """Compile, warm, capture, time, verify: every rank passes each point before any goes on."""
    run = setup.config.run
    batches = make_batches(setup.config, setup.plan, runtime.world)
    compile_all(runtime)
    runtime.world.barrier()
    first = warm_up(runtime, runtime.eager(), batches, max(1, run.warmup_steps // 2))
    step = runtime.step()
    runtime.world.barrier()
    warm_up(runtime, step, batches, run.warmup_steps)
    samples = SampleWriter(folder, runtime.world.rank)
    timed = timed_steps(runtime, step, batches, run.steps, samples.add)
    samples.close()
    verification = None
    if run.verify:
        verification = verify_step(runtime, step, batches[:VERIFIED])
    return Measured(timed, step.kind, first, verification, started)


def _report(result: Result, folder: RunFolder, ranks: world.World) -> int:
    code = EXIT_OF[result.status]
    if ranks.rank == 0:
        path = save_result(folder, to_json(result))
        merge_samples(folder)
        write_status(folder.status, Status(phase="done", exit_code=int(code)))
        print_report(result)
        sys.stdout.write(summary_line(result, path) + "\n")
        sys.stdout.flush()
    ranks.barrier()
    return code


def _refuse(error: UserError, launch: Launch) -> int:
    """Every rank reads the same files: one a node says what is wrong, before the others leave."""
    if launch.local_rank == 0:
        return _complain(error)
    time.sleep(PRINTING_S)
    return error.exit_code


def _complain(error: UserError) -> int:
    sys.stderr.write(f"epdecode: {error}\n")
    sys.stderr.flush()
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
