"""Stopping together: whatever the timing, all ranks begin the same steps."""

import random
import threading
import time

import pytest

from epdecode.watch.stop import StopGate


def test_without_a_stop_every_step_begins():
    gate = StopGate()
    assert [gate.may_begin() for _ in range(5)] == [True] * 5
    assert not gate.stopped


def test_promise_is_what_has_begun_and_stays():
    gate = StopGate()
    gate.may_begin()
    assert gate.promise() == 1
    assert gate.promise() == 1
    gate.decide([1, 3])
    assert [gate.may_begin() for _ in range(3)] == [True, True, False]
    assert gate.stopped


@pytest.mark.parametrize("seed", range(20))
def test_ranks_in_lockstep_stop_at_the_same_step(seed):
    """Each step is a barrier, as its collectives are; promises arrive at any time."""
    size, rng = 4, random.Random(seed)
    gates = [StopGate() for _ in range(size)]
    barrier, done = threading.Barrier(size), [0] * size

    def rank(index):
        for _ in range(10_000):
            if not gates[index].may_begin():
                return
            barrier.wait(10)
            done[index] += 1

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    time.sleep(rng.random() * 0.01)
    promises = []
    for index in rng.sample(range(size), size):
        promises.append(gates[index].promise())
        time.sleep(rng.random() * 0.003)
    for index in rng.sample(range(size), size):
        gates[index].decide(promises)
    for thread in threads:
        thread.join(10)
    assert done == [max(promises)] * size
    assert all(gate.stopped for gate in gates)
