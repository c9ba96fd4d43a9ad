"""A small job of real processes under watch: gloo collectives, steps of stages, a run folder."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from epdecode.config import LimitsConfig
from epdecode.result.samples import SampleWriter
from epdecode.result.save import RunFolder
from epdecode.watch import Watch
from epdecode.watch.faults import read_fault
from epdecode.watch.judge import Seat
from epdecode.watch.processes import die_with_launcher
from epdecode.watch.signals import SignalInbox

RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["tests.watched"])

STAGES = ("dispatch_send", "down_gemm", "combine_wait")
LIMITS = LimitsConfig(join_s=6, warmup_s=4, step_s=2, stale_s=1)


@dataclass(frozen=True)
class Job:
    """What every rank needs to know."""

    folder: Path
    port: int
    size: int = 3
    steps: int = 10
    step_s: float = 0.01
    fault: str = ""
    limits: LimitsConfig = LIMITS
    warmup_s: tuple[float, ...] = ()
    """Seconds of warm-up per rank: cold compilation."""
    gil_s: tuple[float, ...] = ()
    """Seconds per rank in which one call of the warm-up keeps the GIL, as a compiler's may."""
    store_rank: int | None = None
    env: dict[str, str] = field(default_factory=dict)


def rank_main(job: Job, rank: int) -> None:
    """One rank, as run.py would do it."""
    os.environ.update(job.env)
    log = os.open(job.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Written through: a killed rank's last words count too.
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    store = dist.TCPStore(
        "127.0.0.1",
        job.port,
        is_master=rank == job.store_rank,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )
    with SignalInbox() as inbox:
        watch = Watch(
            store.clone(),
            Seat(rank, job.size, job.store_rank),
            job.limits,
            inbox,
            read_fault({"EPDECODE_FAULT": job.fault}, enabled=True),
        )
        try:
            code = _run(job, rank, store, watch)
        except Exception as error:  # noqa: BLE001 - run.py does the same
            watch.fail(error)
    os._exit(code)


def _run(job: Job, rank: int, store: Any, watch: Watch) -> int:
    folder = RunFolder(job.folder / "run")
    samples = SampleWriter(folder, rank, interval_s=0.05)
    watch.use(folder, lambda verdict: _say("lost", verdict.cause.kind))
    watch.keep(samples.flush)
    watch.phase("join")
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("gloo", store),
        rank=rank,
        world_size=job.size,
        timeout=timedelta(seconds=600),
    )
    watch.phase("load")
    dist.barrier()
    watch.phase("warmup")
    time.sleep(job.warmup_s[rank] if job.warmup_s else 0)
    if job.gil_s:
        ctypes.PyDLL(None).usleep(int(1e6 * job.gil_s[rank]))
    dist.barrier()
    watch.phase("steps")
    done = _steps(job, watch, samples)
    watch.phase("report")
    dist.barrier()
    samples.close()
    _say("done", done)
    stop = watch.stop
    watch.close(stop.exit_code if stop else 0, stop.cause if stop else None)
    return stop.exit_code if stop else 0


def _steps(job: Job, watch: Watch, samples: SampleWriter) -> int:
    done = 0
    for step in watch.steps(job.steps):
        begun = time.perf_counter()
        for stage in STAGES:
            watch.progress(step, stage)
            dist.all_reduce(torch.ones(4))
        time.sleep(job.step_s)
        samples.add("plain", step, 1e6 * (time.perf_counter() - begun))
        done += 1
    return done


def _say(name: str, value: object) -> None:
    sys.stdout.write(json.dumps({name: value}) + "\n")


class Running:
    """The processes of a job."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = Job(folder=folder, port=self.store.port)
        self.job = replace(job, **changes)
        run = RunFolder(folder / "run")
        for path in (run.path, run.log, run.parts):
            path.mkdir()
        self.folder = run
        self.processes = [
            RANKS.Process(target=rank_main, args=(self.job, rank)) for rank in range(self.job.size)
        ]
        self.began = time.monotonic()
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = 20) -> float:
        """Seconds until all have ended; kills what has not and fails then."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        took = time.monotonic() - self.began
        left = [process.pid for process in self.processes if process.is_alive()]
        for process in self.processes:
            process.kill()
            process.join()
        assert not left, f"processes {left} did not leave within {seconds} s\n{self.logs()}"
        return took

    def wait_for_step(self, step: int, rank: int = 0, seconds: float = 20) -> None:
        """Return when a rank's samples show that it has passed ``step``."""
        path = self.folder.parts / f"rank{rank:05d}.jsonl"
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with suppress(FileNotFoundError):
                if len(path.read_text().splitlines()) > step:
                    return
            time.sleep(0.01)
        raise AssertionError(f"step {step} not reached\n{self.logs()}")

    @property
    def exit_codes(self) -> list[int | None]:
        """Negative = the signal that ended it."""
        return [process.exitcode for process in self.processes]

    @property
    def status(self) -> dict[str, Any]:
        """status.json."""
        document: dict[str, Any] = json.loads(self.folder.status.read_text())
        return document

    def log(self, rank: int) -> str:
        """What a rank wrote."""
        return (self.job.folder / f"{rank}.log").read_text()

    def logs(self) -> str:
        """All ranks' output."""
        return "\n".join(f"--- {rank}\n{self.log(rank)}" for rank in range(self.job.size))

    def alive(self) -> list[int]:
        """Processes of the job that still exist."""
        return [p.pid for p in self.processes if p.pid and psutil.pid_exists(p.pid)]


def torchrun_main(folder: Path) -> None:
    """The same job as a rank of a real torchrun, whose agent serves the store."""
    die_with_launcher()
    job = Job(
        folder=folder,
        port=int(os.environ["MASTER_PORT"]),
        size=int(os.environ["WORLD_SIZE"]),
        steps=2000,
        fault=os.environ.get("FAULT", ""),
    )
    rank_main(job, int(os.environ["RANK"]))


if __name__ == "__main__":
    torchrun_main(Path(sys.argv[1]))
