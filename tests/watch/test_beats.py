"""Beats over a store in memory: what ranks tell each other, and whom they listen to."""

import threading
import time

import pytest

from epdecode.result import Cause
from epdecode.watch.beats import SUCCESSORS, Beat, Beats, Heard, Verdict
from epdecode.watch.processes import Identity
from epdecode.watch.progress import Position


class MemoryStore:
    """set, get, check and add of a torch store; broken on request."""

    def __init__(self):
        self.values, self.lock, self.broken = {}, threading.Lock(), False
        self.read = []

    def _check(self):
        if self.broken:
            raise RuntimeError("store is gone")

    def set(self, key, value):
        self._check()
        self.values[key] = value.encode()

    def get(self, key):
        self._check()
        self.read.append(key)
        return self.values[key]

    def check(self, keys):
        self._check()
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        self._check()
        with self.lock:
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]


class Rank:
    """One rank's beats, with a position to move."""

    def __init__(self, store, rank, size):
        self.at = Position("steps", 0, "route", 0, 0)
        self.beats = Beats(
            store, (rank, size), 0.01, Identity.mine(), lambda n: Beat(n, self.at, False, None)
        )
        self.beats.start()

    def move(self):
        self.at = Position("steps", 0, "route", 0, self.at.moves + 1)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def ranks(store):
    made = []

    def start(rank, size):
        made.append(Rank(store, rank, size))
        return made[-1]

    yield start
    store.broken = False
    for rank in made:
        rank.beats.close(5)


def until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()


def test_life_and_progress_are_told_apart(ranks):
    mine, peer = ranks(0, 2), ranks(1, 2)
    until(lambda: 1 in mine.beats.heard)
    first = mine.beats.heard[1]
    until(lambda: mine.beats.heard[1].beat_at > first.beat_at)
    assert mine.beats.heard[1].moved_at == first.moved_at
    peer.move()
    until(lambda: mine.beats.heard[1].moved_at > first.moved_at)


def test_first_verdict_stands_for_all(ranks):
    one, two = ranks(0, 2), ranks(1, 2)
    verdicts = [Verdict(Cause(kind="died", rank=rank, message=""), 6) for rank in (2, 3)]
    one.beats.publish(verdicts[0])
    until(lambda: one.beats.verdict)
    two.beats.publish(verdicts[1])
    until(lambda: two.beats.verdict)
    assert one.beats.verdict == two.beats.verdict == verdicts[0]


def test_stop_and_saved_reach_everybody(ranks):
    one, two = ranks(0, 2), ranks(1, 2)
    one.beats.ask_stop("SIGTERM")
    two.beats.ask_stop("SIGINT")
    until(lambda: one.beats.stop and two.beats.stop)
    assert one.beats.stop == two.beats.stop
    assert not two.beats.saved
    one.beats.tell_saved()
    until(lambda: two.beats.saved)


def test_a_broken_store_is_noticed_and_survived(ranks, store):
    mine = ranks(0, 2)
    until(lambda: mine.beats.round_started)
    store.broken = True
    until(lambda: mine.beats.error)
    answered = mine.beats.answered_at
    time.sleep(0.05)
    assert mine.beats.answered_at == answered
    assert "store is gone" in str(mine.beats.error)
    store.broken = False
    until(lambda: mine.beats.answered_at > answered)


def test_large_worlds_listen_in_a_ring(ranks, store):
    size = 40
    everyone = [ranks(rank, size) for rank in (0, 30)]
    for rank in range(size):
        store.set(f"watch/who/{rank}", store.values["watch/who/0"].decode())
    mine = everyone[1].beats
    until(lambda: len(mine.following) == size - 1)
    mine.follow_all = False
    until(lambda: len(mine.following) == SUCCESSORS)
    assert mine.following == tuple((30 + n) % size for n in range(1, SUCCESSORS + 1))
    mine.ask_stop("SIGTERM")
    until(lambda: len(mine.following) == size - 1)


def test_a_rank_listened_to_again_starts_afresh(ranks, store):
    mine = ranks(0, 40)
    ranks(30, 40)
    until(lambda: 30 in mine.beats.heard)
    mine.beats.follow_all = False
    until(lambda: len(mine.beats.following) == SUCCESSORS)
    old = mine.beats.heard[30]
    time.sleep(0.1)
    mine.beats.follow_all = True
    until(lambda: 30 in mine.beats.following)
    assert mine.beats.heard[30].moved_at > old.moved_at + 0.05


def test_forgive(ranks):
    mine = ranks(0, 2)
    ranks(1, 2)
    until(lambda: 1 in mine.beats.heard)
    mine.beats.close(5)
    now = time.monotonic()
    mine.beats.heard[1] = Heard(mine.beats.heard[1].beat, now - 3, now - 5)
    mine.beats.answered_at = now  # a round ended between the pause and this
    mine.beats.forgive(3, 1)
    heard = mine.beats.heard[1]
    assert heard.beat_at == pytest.approx(now + 1)
    assert heard.moved_at == pytest.approx(now - 1)
    assert mine.beats.answered_at <= time.monotonic()
