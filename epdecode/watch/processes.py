"""Other processes of this job as this host sees them, and the tie to the launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from epdecode.watch.progress import PeerProgress

State = Literal["running", "stopped", "gone", "elsewhere"]

PR_SET_PDEATHSIG = 1
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, told apart from every other one there was or will be."""

    host: str
    kernel: str
    """Equal for processes whose numbers can be compared: same boot, same PID namespace."""
    pid: int
    started: float
    """Seconds since the epoch, as the kernel counts them."""
    progress_handle: int = -1
    """Descriptor of its shared progress, -1 = none."""

    @classmethod
    def mine(cls, progress_handle: int = -1) -> Identity:
        """This process."""
        me = psutil.Process()
        return cls(socket.gethostname(), _kernel(), me.pid, me.create_time(), progress_handle)


class Peer:
    """Looks at another process; cheap enough to ask several times a second."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.progress: PeerProgress | None = None
        """Its position, where it can be read."""
        self._process: psutil.Process | None = None
        self._gone = False
        if identity.kernel != _kernel():
            return
        try:
            process = psutil.Process(identity.pid)
            if process.create_time() == identity.started:
                self._process = process
                self.progress = _open_progress(identity)
            else:
                self._gone = True
        except psutil.NoSuchProcess:
            self._gone = True

    def state(self) -> State:
        """running, stopped (by a signal or a debugger), gone, or elsewhere = cannot be seen."""
        if self._gone:
            return "gone"
        if self._process is None:
            return "elsewhere"
        try:
            status = self._process.status()
        except psutil.NoSuchProcess:
            status = psutil.STATUS_DEAD
        self._gone = status in GONE
        return "gone" if self._gone else "stopped" if status in STOPPED else "running"

    def send(self, number: signal.Signals) -> None:
        """Send a signal unless the process is gone or on another host."""
        if self._process is None or self._gone:
            return
        try:
            if self._process.is_running():
                self._process.send_signal(number)
        except psutil.NoSuchProcess:
            self._gone = True


def die_with_launcher() -> None:
    """Have the kernel send SIGTERM when the launcher dies, and leave now if it is dead already.

    Only for ranks that torchrun started: a run started from a shell may outlive it. The signal is
    SIGTERM, so that what was measured is still saved; the watch notices the new parent.
    """
    if not (sys.platform == "linux" and started_by_torchrun()):
        return
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


def started_by_torchrun() -> bool:
    """torchrun's agent is our parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _open_progress(identity: Identity) -> PeerProgress | None:
    if identity.progress_handle < 0:
        return None
    try:
        return PeerProgress(identity.pid, identity.progress_handle)
    except OSError:
        return None


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"
