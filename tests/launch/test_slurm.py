"""launch/multinode.sbatch on a real Slurm: 2 nodes x 2 ranks, the CPU preset."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch import slurm
from tests.launch.scripts import ROOT
from tests.launch.test_launch_scripts import address

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(180)]

SCRIPT = ROOT / "launch/multinode.sbatch"
ENDLESS = ("run.steps=1000000", "run.verify=false")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := slurm.missing():
        pytest.skip(reason)
    if address() is None:
        pytest.skip("this machine has a loopback interface only")
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_job_is_left(cluster):
    yield
    cluster.run("scancel", "--user=root")


def submit(cluster, out: Path, *arguments: str) -> tuple[str, Path]:
    # Both nodes are this machine, so the name of the first one leads nowhere.
    return cluster.submit(
        SCRIPT,
        "--out",
        str(out),
        *arguments,
        EPDECODE_MASTER_ADDR=address()[1],
        EPDECODE_PYTHON=sys.executable,
    )


def processes(out: Path) -> dict[int | None, psutil.Process]:
    """Rank (None: its torchrun) -> process, of the job that writes to ``out``."""
    found = {}
    for process in psutil.process_iter():
        try:
            if str(out) in process.cmdline() and "epdecode.run" in process.cmdline():
                rank = process.environ().get("RANK")
                found[int(rank) if rank else None] = process
        except psutil.Error:
            continue
    return found


def status(out: Path) -> dict:
    files = list(out.glob("*/status.json"))
    return json.loads(files[0].read_text()) if files else {}


def wait_for_steps(out: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while status(out).get("phase") != "steps":
        assert time.monotonic() < deadline, f"no step in {seconds:g} s: {status(out)}"
        time.sleep(0.1)


def test_two_nodes_of_two_ranks_pass(cluster, tmp_path) -> None:
    job, log = submit(cluster, tmp_path)
    assert cluster.wait(job, 90) == "COMPLETED", log.read_text()
    line = json.loads(log.read_text().strip().splitlines()[-1])
    assert (line["status"], line["exit_code"], line["world_size"]) == ("passed", 0, 4)
    assert status(tmp_path)["exit_code"] == 0
    assert processes(tmp_path) == {}


def test_a_killed_rank_ends_the_job_and_is_named(cluster, tmp_path) -> None:
    job, log = submit(cluster, tmp_path, *ENDLESS)
    wait_for_steps(tmp_path)
    # On the second node, so that its end has to cross to the first.
    processes(tmp_path)[3].kill()
    assert cluster.wait(job, 60) == "FAILED", log.read_text()
    end = status(tmp_path)
    assert (end["exit_code"], end["cause"]["rank"]) == (6, 3), log.read_text()
    assert processes(tmp_path) == {}


def test_scancel_leaves_nothing(cluster, tmp_path) -> None:
    job, log = submit(cluster, tmp_path, *ENDLESS)
    wait_for_steps(tmp_path)
    assert cluster.run("scancel", job).returncode == 0
    assert cluster.wait(job, 60) == "CANCELLED", log.read_text()
    deadline = time.monotonic() + 15
    while processes(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes(tmp_path) == {}
    assert status(tmp_path)["exit_code"] in (75, 130, 6)


def test_tasks_per_rank_are_refused(cluster, tmp_path) -> None:
    job, log = cluster.submit(SCRIPT, options=("--ntasks-per-node=2",))
    state = cluster.wait(job, 30)
    assert (state, "double launch" in log.read_text()) == ("FAILED", True), log.read_text()


def test_a_stale_rank_is_refused(cluster, tmp_path) -> None:
    job, log = cluster.submit(
        SCRIPT, EPDECODE_MASTER_ADDR=address()[1], EPDECODE_PYTHON=sys.executable, RANK="0"
    )
    assert cluster.wait(job, 30) == "FAILED"
    assert "RANK=0 is left over from another launch" in log.read_text()


def test_a_loopback_master_is_refused(cluster, tmp_path) -> None:
    job, log = cluster.submit(
        SCRIPT, EPDECODE_MASTER_ADDR="127.0.0.1", EPDECODE_PYTHON=sys.executable
    )
    assert cluster.wait(job, 30) == "FAILED"
    assert "127.0.0.1 is a loopback address" in log.read_text()
