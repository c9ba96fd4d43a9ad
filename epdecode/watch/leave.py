"""Leaving a run that cannot go on: keep what was measured, say why, leave nothing running."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO, NoReturn

from epdecode.errors import ConfigError
from epdecode.result.document import failure_line
from epdecode.result.save import RunFolder
from epdecode.result.status import Status, read_status, write_status
from epdecode.watch.beats import Verdict
from epdecode.watch.processes import Peer

log = logging.getLogger("epdecode.watch")

LEAVE_S = 15.0
"""After this long the process is ended from C, whatever Python is doing."""
WRITER_S = 3.0
"""The other ranks wait this long for the writing rank's status.json, then write their own."""
REAP_S = 2.0
"""Ranks of this host that are still there so long after the end are killed."""
KILLED_KINDS = ("stopped", "frozen")


class Leaver:
    """One rank's way out. ``folder`` and the callbacks come as the run gets on."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.folder: RunFolder | None = None
        self.on_loss: Callable[[Verdict], None] | None = None
        self.keep: list[Callable[[], None]] = []
        self._stacks: IO[str] | None = None

    def use(self, folder: RunFolder) -> None:
        """Send crash and on-demand stack dumps (SIGUSR2, even while the GIL is held) there."""
        self.folder = folder
        self._stacks = (folder.log / f"rank{self._rank:05d}.stacks.txt").open("a")
        faulthandler.enable(self._stacks)
        faulthandler.register(signal.SIGUSR2, self._stacks, all_threads=True)

    def close(self) -> None:
        """The run ended well: no stacks are wanted any more."""
        if self._stacks and self.folder:
            faulthandler.disable()
            faulthandler.unregister(signal.SIGUSR2)
            self._stacks.close()
            path = self.folder.log / f"rank{self._rank:05d}.stacks.txt"
            if path.stat().st_size == 0:
                path.unlink()
            self._stacks = None

    def leave(
        self, verdict: Verdict, status: Status, peers: Mapping[int, Peer], save: bool = True
    ) -> NoReturn:
        """End this process with the verdict's exit code. Any thread may call it."""
        stacks = 2 if self._stacks is None else self._stacks
        faulthandler.dump_traceback_later(LEAVE_S, exit=True, file=stacks)
        log.error("leaving with exit code %d: %s", verdict.exit_code, verdict.cause.message)
        self._dump(verdict)
        culprit = peers.get(verdict.cause.rank) if verdict.cause.rank is not None else None
        if culprit and verdict.cause.kind in KILLED_KINDS:
            _kill(culprit, with_stacks=verdict.cause.kind == "frozen")
        if save:
            _call_all(self.keep)
        if self._rank == self._writer(verdict, peers) or not self._told_by_writer():
            if save and self.on_loss:
                _call_all([lambda: self.on_loss and self.on_loss(verdict)])
            elif self.folder is None:
                sys.stdout.write(failure_line(verdict.exit_code, verdict.cause, None) + "\n")
            self._write(status)
            _reap(peers.values())
        logging.shutdown()
        _flush()
        os._exit(verdict.exit_code)

    def _dump(self, verdict: Verdict) -> None:
        if self._stacks:
            self._stacks.write(f"{verdict.cause.kind}: {verdict.cause.message}\n")
            self._stacks.flush()
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _writer(self, verdict: Verdict, peers: Mapping[int, Peer]) -> int:
        """The lowest rank that is neither at fault nor seen dead or stopped."""
        lost = {rank for rank, peer in peers.items() if peer.state() in ("gone", "stopped")}
        lost.add(-1 if verdict.cause.rank is None else verdict.cause.rank)
        return min(set(range(self._size)) - lost, default=self._rank)

    def _told_by_writer(self) -> bool:
        if self.folder is None:
            return True
        until = time.monotonic() + WRITER_S
        while time.monotonic() < until:
            try:
                if read_status(self.folder.status).exit_code is not None:
                    return True
            except ConfigError:
                pass
            time.sleep(0.05)
        return False

    def _write(self, status: Status) -> None:
        if self.folder is None:
            return
        try:
            write_status(self.folder.status, status)
        except OSError as error:
            log.error("%s: not written: %s", self.folder.status, error)


def _kill(peer: Peer, with_stacks: bool) -> None:
    if with_stacks:
        peer.send(signal.SIGUSR2)
        time.sleep(0.2)
    peer.send(signal.SIGKILL)


def _reap(peers: Iterable[Peer]) -> None:
    """Kill what is left of the run on this host."""
    until = time.monotonic() + REAP_S
    left = list(peers)
    while left and time.monotonic() < until:
        left = [peer for peer in left if peer.state() not in ("gone", "elsewhere")]
        time.sleep(0.05)
    for peer in left:
        log.error("killing process %d of this run, which does not leave", peer.identity.pid)
        peer.send(signal.SIGKILL)


def _call_all(callbacks: Iterable[Callable[[], object]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:
            log.exception("while leaving")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
