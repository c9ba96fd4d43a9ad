"""Faults of real processes: the right rank, stage and kind, everybody gone, nothing broken."""

import atexit
import json
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from epdecode.result import Cause
from epdecode.result.samples import read_samples
from epdecode.result.save import RunFolder
from epdecode.result.status import read_status
from epdecode.watch import FOLLOWING, Watch
from epdecode.watch.beats import Verdict
from epdecode.watch.judge import Seat
from epdecode.watch.signals import SignalInbox
from tests.failures import FAILURES, page
from tests.watched import LIMITS, Running

REPEATS = int(os.environ.get("EPDECODE_FAULT_REPEATS", "1"))
START_S = 2.5
"""Until the fault is reached: processes, group, first steps."""
FAILURES_MD = Path(__file__).resolve().parent.parent.parent / "docs" / "failures.md"


def check_whole(running):
    """No process, no temporary file, no broken JSON is left."""
    assert running.alive() == []
    assert list(running.folder.path.rglob("*.tmp")) == []
    for path in running.folder.path.rglob("*.json"):
        json.loads(path.read_text())
    list(read_samples(running.folder))


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name.replace(" ", "-"))
def test_fault(tmp_path, failure, repeat):
    steps = 100 if failure.exit_code in (75, 130) else 10
    running = Running(tmp_path, fault=failure.fault, steps=steps)
    took = running.wait()
    status = running.status
    cause = status["cause"]
    told = running.logs() + json.dumps(status, indent=1)
    assert (cause["kind"], cause["rank"], cause["stage"]) == (
        failure.kind,
        failure.rank,
        failure.stage,
    ), told
    if failure.step is not None:
        assert cause["step"] == failure.step, told
    assert status["exit_code"] == failure.exit_code, told
    codes = [failure.exit_code] * 3
    if failure.silent_exit is not None:
        codes[failure.rank] = failure.silent_exit
    assert running.exit_codes == codes, told
    # Since that rank began: the first test also starts the server that forks the ranks.
    assert status["updated"] - status["pid_started"] < START_S + failure.within_s, told
    assert took < 10, told
    check_whole(running)
    if failure.exit_code in (75, 130):
        done = {json.loads(running.log(rank).splitlines()[-1])["done"] for rank in range(3)}
        assert len(done) == 1
        assert 4 <= done.pop() < 100
        return
    survivors = [rank for rank in range(3) if rank != failure.rank]
    for rank in survivors:
        assert cause["message"] in running.log(rank), told
    assert status["stopped_by"] == survivors[0]
    assert json.dumps({"lost": failure.kind}) in running.log(survivors[0])
    assert json.dumps({"lost": failure.kind}) not in running.log(survivors[1])
    stacks = (running.folder.log / f"rank{survivors[0]:05d}.stacks.txt").read_text()
    assert failure.kind in stacks
    assert "watched.py" in stacks


def test_page_is_current():
    assert FAILURES_MD.read_text() == page()


def test_samples_before_the_fault_are_kept(tmp_path):
    running = Running(tmp_path, fault="kill@1:7:down_gemm", step_s=0.05)
    running.wait()
    kept = dict.fromkeys(range(3), 0)
    for line in read_samples(running.folder):
        kept[line["rank"]] += 1
    assert kept[0] == kept[2] == 7
    assert 5 <= kept[1] <= 7


def test_good_run(tmp_path):
    running = Running(tmp_path)
    running.wait()
    assert running.exit_codes == [0, 0, 0], running.logs()
    assert running.status["exit_code"] == 0
    assert running.status["phase"] == "done"
    assert list(running.folder.log.iterdir()) == []
    check_whole(running)


def test_world_of_one(tmp_path):
    running = Running(tmp_path, size=1, fault="raise@0:3:down_gemm")
    running.wait()
    assert running.exit_codes == [1]
    assert running.status["cause"]["message"] == "rank 0: ArithmeticError: injected"


def test_frozen_rank_leaves_its_stack(tmp_path):
    running = Running(tmp_path, fault="gil@2:3:down_gemm")
    running.wait()
    stacks = (running.folder.log / "rank00002.stacks.txt").read_text()
    assert "_hold_gil" in stacks


def test_slow_rank_is_not_killed(tmp_path):
    running = Running(tmp_path, fault="slow@1:0:down_gemm", limits=replace(LIMITS, step_s=1))
    running.wait()
    assert running.exit_codes == [0, 0, 0], running.logs()


def test_cold_compilation_on_one_rank_trips_nobody(tmp_path):
    """Warm-up of 0, 1.5 and 3 s, steps watched at 0.8 s."""
    limits = replace(LIMITS, step_s=0.8, warmup_s=30)
    running = Running(tmp_path, warmup_s=(0, 1.5, 3), limits=limits)
    assert running.wait() > 3
    assert running.exit_codes == [0, 0, 0], running.logs()


def test_rank_that_serves_the_store_dies(tmp_path):
    port = _free_port()
    running = Running(tmp_path, port=port, store_rank=0, fault="kill@0:3:down_gemm")
    assert running.wait() < 10
    assert running.exit_codes == [-9, 6, 6], running.logs()
    cause = running.status["cause"]
    assert (cause["kind"], cause["rank"]) == ("died", 0)
    check_whole(running)


def test_rank_that_serves_the_store_stops(tmp_path):
    port = _free_port()
    running = Running(tmp_path, port=port, store_rank=0, fault="stop@0:3:down_gemm")
    assert running.wait() < 10
    assert running.exit_codes == [-9, 6, 6], running.logs()
    assert running.status["cause"]["rank"] == 0
    assert running.status["cause"]["kind"] in ("stopped", "silent")


def test_a_compiler_that_keeps_the_gil_in_warm_up(tmp_path):
    limits = replace(LIMITS, warmup_s=30)
    running = Running(tmp_path, gil_s=(4, 2.5, 0), limits=limits)
    running.wait()
    assert running.exit_codes == [0, 0, 0], running.logs()


def test_good_run_with_the_store_in_rank_0(tmp_path):
    running = Running(tmp_path, port=_free_port(), store_rank=0)
    running.wait()
    assert running.exit_codes == [0, 0, 0], running.logs()


def test_absent_rank(tmp_path):
    running = Running(tmp_path, size=3, limits=replace(LIMITS, join_s=1.5), fault="sleep@9:0:x")
    running.processes[2].kill()
    running.processes[2].join()
    running.wait()
    cause = running.status["cause"]
    assert (cause["rank"], running.status["exit_code"]) == (2, 6)
    assert cause["kind"] in ("absent", "died")


def test_whole_job_stopped_and_continued(tmp_path):
    running = Running(tmp_path, steps=60, step_s=0.02)
    running.wait_for_step(3)
    for process in running.processes:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3)
    for process in running.processes:
        os.kill(process.pid, signal.SIGCONT)
    running.wait()
    assert running.exit_codes == [0, 0, 0], running.logs()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_to_all_ranks(tmp_path, number):
    running = Running(tmp_path, steps=1000, step_s=0.01)
    running.wait_for_step(5)
    for process in running.processes:
        os.kill(process.pid, number)
        time.sleep(0.02)
    running.wait()
    code = 130 if number == signal.SIGINT else 75
    assert running.exit_codes == [code] * 3, running.logs()
    assert running.status["exit_code"] == code
    assert number.name in running.status["cause"]["message"]
    steps = {}
    for line in read_samples(running.folder):
        steps.setdefault(line["rank"], []).append(line["step"])
    assert steps[0] == steps[1] == steps[2]
    assert 5 < len(steps[0]) < 1000


def test_signal_before_the_first_step(tmp_path):
    limits = replace(LIMITS, warmup_s=30)
    running = Running(tmp_path, warmup_s=(20, 20, 20), limits=limits)
    time.sleep(1.5)
    os.kill(running.processes[1].pid, signal.SIGTERM)
    assert running.wait() < 8
    assert running.exit_codes == [75] * 3, running.logs()
    assert running.status["cause"]["kind"] == "preempted"


def test_second_signal_leaves_at_once(tmp_path):
    """Every step takes 5 s, so the first signal would wait for its end."""
    limits = replace(LIMITS, step_s=30)
    running = Running(tmp_path, steps=5, step_s=5, limits=limits)
    time.sleep(2)
    os.kill(running.processes[0].pid, signal.SIGINT)
    time.sleep(1.3)
    os.kill(running.processes[0].pid, signal.SIGINT)
    begun = time.monotonic()
    running.wait()
    assert time.monotonic() - begun < 3
    assert running.exit_codes == [130] * 3, running.logs()


def test_the_end_in_status_json_is_not_written_over(tmp_path):
    """The judge ends the run while the main thread goes on to the next phase."""
    folder = RunFolder(tmp_path / "run")
    folder.log.mkdir(parents=True)
    cause = Cause(kind="out_of_memory", rank=1, message="asked for 2 GiB")
    with SignalInbox() as inbox:
        watch = Watch(dist.HashStore(), Seat(0, 1), LIMITS, inbox)
        watch.use(folder)
        watch.phase("load")
        watch._leaver.leave = lambda verdict, status, peers, save: watch._leaver._write(status)
        watch._end(Verdict(cause, 7), save=True)
        main = threading.Thread(target=watch.phase, args=("warmup",), daemon=True)
        main.start()
        main.join(0.3)
        assert main.is_alive()  # as long as the process does
        status = read_status(folder.status)
        assert (status.phase, status.exit_code, status.cause) == ("load", 7, cause)
        atexit.unregister(watch._left_early)
        watch._judge.close()
        watch._leaver.close()


def test_death_then_sigterm_from_the_launcher(tmp_path):
    """torchrun sends SIGTERM to the peers of a dead rank: the death is the cause."""
    running = Running(tmp_path, fault="kill@1:3:down_gemm")
    running.processes[1].join()
    for rank in (0, 2):
        os.kill(running.processes[rank].pid, signal.SIGTERM)
    running.wait()
    assert running.exit_codes == [6, -9, 6], running.logs()
    assert running.status["cause"]["kind"] == "died"


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_the_experts_are_followed_by_combine_however_many_stages_they_have():
    assert FOLLOWING["gate_up_gemm"] == "act_quant"
    assert FOLLOWING["down_gemm"] == FOLLOWING["expert_chain"] == "combine_send"
    assert FOLLOWING["shared_expert"] == "route"
