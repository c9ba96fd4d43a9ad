"""Under a real torchrun: its death, its signals, and the truth that its exit code is not."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from epdecode.result.save import RunFolder
from epdecode.result.status import read_status

pytestmark = pytest.mark.torchrun

ROOT = Path(__file__).resolve().parent.parent
RANKS = 3


class Launch:
    """torchrun with the small watched job."""

    def __init__(self, folder, fault=""):
        self.folder = RunFolder(folder / "run")
        for path in (self.folder.path, self.folder.log, self.folder.parts):
            path.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), "-m", "tests.watched", str(folder)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT": fault}
        self.torchrun = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.ranks = []

    def wait_for_step(self, step):
        """Until every rank's samples have passed ``step``; notes the ranks' processes."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(FileNotFoundError):
                parts = [self.folder.parts / f"rank{rank:05d}.jsonl" for rank in range(RANKS)]
                if all(len(part.read_text().splitlines()) > step for part in parts):
                    self.ranks = psutil.Process(self.torchrun.pid).children()
                    return
            time.sleep(0.05)
        raise AssertionError("the job did not start")

    def end(self, seconds=20):
        """Wait for launcher and ranks; kill and fail when some stay."""
        with suppress(subprocess.TimeoutExpired):
            self.torchrun.wait(seconds)
        _, left = psutil.wait_procs(self.ranks, timeout=seconds)
        for process in left:
            process.kill()
        self.torchrun.kill()
        self.torchrun.wait()
        assert left == []
        return read_status(self.folder.path)


@pytest.fixture
def launch(tmp_path):
    made = []

    def start(fault=""):
        made.append(Launch(tmp_path, fault))
        return made[-1]

    yield start
    for one in made:
        one.torchrun.kill()
        for process in one.ranks:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_launcher_killed(launch):
    job = launch()
    job.wait_for_step(3)
    job.torchrun.kill()
    status = job.end()
    assert (status.exit_code, status.cause.kind) == (6, "launcher_lost")


def test_launcher_killed_with_a_stopped_rank(launch):
    job = launch()
    job.wait_for_step(3)
    job.ranks[1].suspend()
    job.torchrun.kill()
    assert job.end().exit_code == 6


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=lambda value: str(value)
)
def test_signal_to_the_launcher(launch, number, code):
    job = launch()
    job.wait_for_step(3)
    job.torchrun.send_signal(number)
    status = job.end()
    assert status.exit_code == code
    steps = [
        json.loads(part.read_text().splitlines()[-1])["step"]
        for part in sorted(job.folder.parts.iterdir())
    ]
    assert len(set(steps)) == 1


def test_killed_rank_is_named_though_torchrun_signals_its_peers(launch):
    job = launch()
    job.wait_for_step(3)
    victim = job.ranks[1]
    rank = int(victim.environ()["RANK"])
    victim.kill()
    status = job.end()
    assert (status.exit_code, status.cause.kind, status.cause.rank) == (6, "died", rank)
    assert job.torchrun.returncode == 1


def test_exception_is_named(launch):
    job = launch(fault="raise@2:50:down_gemm")
    job.wait_for_step(3)
    status = job.end()
    assert (status.exit_code, status.cause.kind, status.cause.rank) == (1, "exception", 2)
    assert status.cause.message == "rank 2: ArithmeticError: injected"
