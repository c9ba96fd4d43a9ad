"""What one process sees of another, and the position that outlives its owner."""

import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest

from epdecode.watch import processes
from epdecode.watch.processes import Identity, Peer
from epdecode.watch.progress import START, PeerProgress, Position, Progress, main_thread_waits

FORK = multiprocessing.get_context("fork")


def _wait_for_ever(pipe):
    progress = Progress()
    progress.phase, progress.step, progress.stage = "steps", 41, "combine_wait"
    progress.ticks = 7
    progress.moved()
    pipe.send(Identity.mine(progress.handle))
    time.sleep(60)


@pytest.fixture
def other():
    here, there = FORK.Pipe()
    process = FORK.Process(target=_wait_for_ever, args=(there,))
    process.start()
    yield Peer(here.recv()), process
    process.kill()
    process.join()


def until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_states(other):
    peer, process = other
    assert peer.state() == "running"
    peer.send(signal.SIGSTOP)
    until(lambda: peer.state() == "stopped")
    peer.send(signal.SIGCONT)
    until(lambda: peer.state() == "running")
    peer.send(signal.SIGKILL)
    until(lambda: peer.state() == "gone")
    process.join()
    assert peer.state() == "gone"
    peer.send(signal.SIGKILL)


def test_position_can_be_read_after_death(other):
    peer, process = other
    process.kill()
    process.join()
    assert peer.progress.position() == Position("steps", 41, "combine_wait", 7, 2)


def test_a_zombie_is_gone(other):
    peer, process = other
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: peer.state() == "gone")


def test_a_later_process_with_the_same_number_is_another(other):
    peer, process = other
    stranger = Peer(replace(peer.identity, started=peer.identity.started - 100))
    assert stranger.state() == "gone"
    stranger.send(signal.SIGKILL)
    time.sleep(0.05)
    assert process.is_alive()


def test_other_host(other):
    peer = Peer(replace(other[0].identity, kernel="another boot"))
    assert peer.state() == "elsewhere"
    assert peer.progress is None
    peer.send(signal.SIGKILL)
    assert other[1].is_alive()


def test_no_process():
    assert Peer(replace(Identity.mine(), pid=2**22 + 1)).state() == "gone"


def test_own_position():
    progress = Progress()
    assert progress.position() == replace(START, moves=1)
    peer = PeerProgress(os.getpid(), progress.handle)
    progress.phase, progress.step, progress.stage = "steps", 0, "x" * 40
    progress.moved()
    assert peer.position() == Position("steps", 0, "x" * 32, 0, 2)
    progress.close()
    progress.moved()
    assert progress.handle == -1


def test_main_thread_waits_in_collectives_only(monkeypatch):
    assert not main_thread_waits()
    monkeypatch.setattr("epdecode.watch.progress.WAITING_IN", ("tests/watch/test_processes",))
    assert main_thread_waits()


@pytest.mark.parametrize(("variable", "expected"), [(None, False), ("job", True)])
def test_started_by_torchrun(monkeypatch, variable, expected):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if variable:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", variable)
    assert processes.started_by_torchrun() is expected


def _orphan(pipe):
    os.environ["TORCHELASTIC_RUN_ID"] = "job"
    pipe.send(None)
    child = os.fork()
    if child == 0:
        processes.die_with_launcher()
        pipe.send(os.getpid())
        time.sleep(60)
    time.sleep(60)


def test_dies_with_its_launcher():
    here, there = FORK.Pipe()
    launcher = FORK.Process(target=_orphan, args=(there,))
    launcher.start()
    here.recv()
    child = here.recv()
    launcher.kill()
    launcher.join()
    until(lambda: not _exists(child))


def _exists(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
