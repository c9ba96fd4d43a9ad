"""Signals reach another thread though the main thread does not run Python."""

import os
import signal
import threading
import time

import pytest

from epdecode.watch import signals
from epdecode.watch.signals import EXIT_OF, SignalInbox


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", list(EXIT_OF))
def test_noted_and_handlers_given_back(number):
    before = signal.getsignal(number)
    with SignalInbox() as inbox:
        send(number)
        inbox.wait(5)
        assert inbox.first == number
        assert not inbox.again
    assert signal.getsignal(number) == before


def test_another_thread_reads_while_main_is_blocked():
    noted = threading.Event()
    with SignalInbox() as inbox:

        def read():
            inbox.wait(5)
            noted.set()

        threading.Thread(target=read, daemon=True).start()
        threading.Timer(0.1, send, [signal.SIGTERM]).start()
        blocked = threading.Lock()
        blocked.acquire()
        begun = time.monotonic()
        blocked.acquire(timeout=1)
        assert noted.is_set()
        assert time.monotonic() - begun >= 0.99


def test_an_echo_is_not_a_second_signal(monkeypatch):
    monkeypatch.setattr(signals, "ECHO_S", 0.2)
    with SignalInbox() as inbox:
        for _ in range(3):
            send(signal.SIGTERM)
        inbox.wait(5)
        inbox.wait(0)
        assert not inbox.again
        time.sleep(0.25)
        send(signal.SIGINT)
        inbox.wait(5)
        assert inbox.again
        assert inbox.first == signal.SIGTERM


def test_wait_ends_without_a_signal():
    with SignalInbox() as inbox:
        begun = time.monotonic()
        inbox.wait(0.05)
        assert 0.04 < time.monotonic() - begun < 2
        assert inbox.first is None
    inbox.wait(0.01)


def test_other_signals_are_left_alone():
    heard = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with SignalInbox() as inbox:
            send(signal.SIGUSR2)
            inbox.wait(0.5)
            assert inbox.first is None
        assert heard == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)
