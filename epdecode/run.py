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
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import Store

from epdecode import envinfo, logs, world
from epdecode.build import build
from epdecode.config.load import find_preset, load_config, resolved_yaml
from epdecode.errors import Exit, UserError
from epdecode.launch.env import Launch, read_launch
from epdecode.measure import measure
from epdecode.oom import check_free, explained
from epdecode.outcome import blank_result, make_result
from epdecode.plan import render
from epdecode.report.console import print_report
from epdecode.result import Cause, Result
from epdecode.result.document import exit_of, failure_line, summary_line, to_json
from epdecode.result.partial import save_lost
from epdecode.result.samples import SampleWriter, merge_samples
from epdecode.result.save import RunFolder, atomic_write, save_json, save_result, utc_now
from epdecode.session import Setup, join, meet, prepare
from epdecode.watch import Watch
from epdecode.watch.faults import read_fault
from epdecode.watch.judge import Seat
from epdecode.watch.processes import die_with_launcher
from epdecode.watch.signals import SignalInbox

log = logging.getLogger("epdecode.run")

PRINTING_S = 2.0
"""torchrun ends all ranks when one leaves with an error; the one that prints gets this long."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on this rank; the exit code of errors.Exit."""
    args = _parse(argv)
    launch = Launch()
    try:
        launch = read_launch(os.environ)
        logs.to_stderr(launch.rank)
        if args.print_config:
            return _print_config(args, launch)
        setup = prepare(args.config, args.override)
        fault = read_fault(os.environ, setup.config.debug.faults)
        die_with_launcher()
        store = meet(setup)
    except UserError as error:
        return _refuse(error, launch)
    with SignalInbox() as inbox:
        seat = Seat(launch.rank, launch.world_size, None if launch.agent_store else 0)
        mine = store.clone()  # type: ignore[attr-defined]
        watch = Watch(mine, seat, setup.config.limits, inbox, fault)
        try:
            return _job(args, setup, store, watch)
        except Exception as error:  # noqa: BLE001 - the watch names the rank at fault and leaves
            watch.fail(error)


def _job(args: argparse.Namespace, setup: Setup, store: Store, watch: Watch) -> int:
    started = utc_now()
    watch.phase("join")
    ranks = join(setup, store)
    name = find_preset(args.config).stem
    folder = _open_folder(args, name, setup, ranks)
    logs.to_file(folder.log, ranks.rank)
    blank = blank_result(name, setup, ranks, started)
    watch.use(folder, partial(save_lost, folder, blank))
    log.info("%s\n%s", folder.path, render(setup.plan))
    samples = SampleWriter(folder, ranks.rank)
    watch.keep(samples.flush)
    watch.phase("load")
    check_free(setup.plan, setup.device)
    with explained("loading", setup.plan, setup.device):
        runtime = build(setup.config, setup.plan, ranks, setup.sources)
    with explained("compiling, capturing, stepping or verifying", setup.plan, setup.device):
        measured = measure(setup, runtime, samples, watch, folder)
    samples.close()
    if stop := watch.stop:
        ranks.barrier()
        if ranks.rank == 0:
            save_lost(folder, blank, stop)
            merge_samples(folder)
        runtime.close()
        watch.close(stop.exit_code, stop.cause)
        return stop.exit_code
    result = make_result(blank, setup, runtime, measured)
    code = exit_of(result)
    if ranks.rank == 0:
        _report(result, folder, code)
    ranks.barrier()
    runtime.close()
    watch.close(code, result.cause)
    world.leave()
    return code


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


def _print_config(args: argparse.Namespace, launch: Launch) -> int:
    """Needs no GPU, whatever the config is for."""
    if launch.rank == 0:
        sys.stdout.write(resolved_yaml(load_config(args.config, args.override), args.config))
    return Exit.OK


def _open_folder(
    args: argparse.Namespace, name: str, setup: Setup, ranks: world.World
) -> RunFolder:
    """Rank 0 makes the folder before anyone starts work; the others join it."""
    made = RunFolder.create(args.out, name, setup.digest) if ranks.rank == 0 else None
    path = Path(ranks.gather_text(str(made.path) if made else "")[0])
    if made:
        atomic_write(made.config, resolved_yaml(setup.config, args.config))
    return made or RunFolder.join(path)


def _report(result: Result, folder: RunFolder, code: int) -> None:
    path = save_result(folder, to_json(result))
    merge_samples(folder)
    save_json(folder.env, envinfo.collect())
    print_report(result)
    sys.stdout.write(summary_line(result, path, code) + "\n")
    sys.stdout.flush()


def _refuse(error: UserError, launch: Launch) -> int:
    """Every rank reads the same files: one a node says what is wrong, before the others leave."""
    if launch.local_rank:
        time.sleep(PRINTING_S)
        return error.exit_code
    sys.stderr.write(f"epdecode: {error}\n")
    sys.stderr.flush()
    if launch.rank == 0:
        cause = Cause(kind=error.exit_code.name.lower(), message=str(error), rank=0)
        sys.stdout.write(failure_line(error.exit_code, cause, None) + "\n")
        sys.stdout.flush()
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
