"""The whole job under torchrun, with something going wrong: what the user is left with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from epdecode.result.document import from_json
from epdecode.result.samples import read_samples
from epdecode.result.save import RunFolder
from epdecode.result.status import read_status

pytestmark = pytest.mark.torchrun

ROOT = Path(__file__).resolve().parent.parent
RUN = "-m epdecode.run --config configs/cpu-tiny.yaml limits.stale_s=1 limits.step_s=5"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Job:
    """A started job; ``end`` gives what it left."""

    def __init__(self, out, command, **env):
        self.out = out
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, seconds=60):
        """Last line of stdout, stderr; nothing of the job may be left."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        _, left = psutil.wait_procs(started, timeout=5)
        assert left == []
        return json.loads(out.splitlines()[-1]), err

    @property
    def folder(self):
        """Its run folder."""
        (path,) = self.out.iterdir()
        return RunFolder(path)


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(*arguments, limit=None, **env):
        command = [*RUN.split(), "--out", str(tmp_path / "runs"), *arguments]
        if limit or any("$" in argument for argument in arguments):
            text = (limit or "exec ") + " ".join([sys.executable, *command])
            command = ["--no-python", "bash", "-c", text]
        command = [*TORCHRUN, *command]
        jobs.append(Job(tmp_path / "runs", command, **env))
        return jobs[-1]

    yield start
    for one in jobs:
        one.process.kill()
        one.process.communicate()


def test_killed_rank(job):
    run = job("debug.faults=true", "run.steps=60", EPDECODE_FAULT="kill@1:40:down_gemm")
    line, err = run.end()
    status = read_status(run.folder.path)
    assert (status.exit_code, status.cause.kind, status.cause.rank) == (6, "died", 1)
    assert (status.cause.step, status.cause.stage) == (40, "down_gemm")
    assert line["exit_code"] == 6
    assert line["cause"]["rank"] == 1
    result = from_json(run.folder.result.read_text())
    assert result.status == "failed"
    plain = [sample["rank"] for sample in read_samples(run.folder) if sample["pass"] == "plain"]
    # A step counts once the next one is under way.
    assert plain.count(0) in (39, 40)
    assert 20 <= result.timing.step.n <= 40
    assert "rank 1" in err


def test_skipped_step(job):
    run = job("debug.faults=true", "run.steps=20", EPDECODE_FAULT="skip@1:3:route")
    line, _ = run.end()
    cause = line["cause"]
    assert (line["exit_code"], cause["kind"], cause["rank"]) == (6, "skipped", 1)
    assert "left a step or stage out" in cause["message"]


def test_killed_before_there_is_a_folder(job):
    run = job("debug.faults=true", EPDECODE_FAULT="kill@1:*:join")
    line, _ = run.end()
    assert (line["exit_code"], line["result"]) == (6, None)
    assert (line["cause"]["kind"], line["cause"]["rank"]) == ("died", 1)


def test_sigterm_keeps_what_was_measured(job):
    run = job("run.steps=5000")
    until = time.monotonic() + 60
    while not list(run.out.glob("*/samples/rank00001.jsonl")) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(2)
    run.process.send_signal(signal.SIGTERM)
    line, _ = run.end()
    assert (line["status"], line["exit_code"]) == ("interrupted", 75)
    assert read_status(run.folder.path).exit_code == 75
    steps = [0, 0]
    for sample in read_samples(run.folder):
        steps[sample["rank"]] += sample["pass"] == "plain"
    assert steps[0] == steps[1] > 0
    assert from_json(run.folder.result.read_text()).timing.step.n == steps[0]


def test_ranks_that_disagree_are_told_apart(job):
    begun = time.monotonic()
    run = job("transport.max_tokens_per_rank=$((16 + 16 * RANK))")
    line, err = run.end()
    assert time.monotonic() - begun < 30
    assert line["exit_code"] == 2
    assert "ranks disagree on config transport.max_tokens_per_rank: " in line["cause"]["message"]
    assert "rank 1 has 32, rank 0 has 16" in line["cause"]["message"]
    assert line["cause"]["message"] in err


def test_full_disk_prints_the_result(job):
    """A limit of 8 KiB a file stands for a disk that is full by the time the result is written."""
    run = job(limit="ulimit -f 8; exec ")
    line, err = run.end()
    assert (line["exit_code"], line["result"]) == (8, None)
    assert "File too large" in err
    assert not run.folder.result.exists()
    assert list(run.folder.path.glob(".*")) == []


def test_out_that_cannot_be_written(job):
    command = [*TORCHRUN, *RUN.split(), "--out", "/proc/nowhere"]
    run = Job(Path("/proc/nowhere"), command)
    line, err = run.end()
    assert line["exit_code"] == 3
    assert "--out: /proc/nowhere" in err
