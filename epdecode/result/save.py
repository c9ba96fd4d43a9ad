"""The run folder: made once, never overwritten, every file in it whole whatever happens.

A file is written under a unique temporary name, flushed to disk and renamed. Samples are appended
by each rank to a file of its own, so that a crash keeps the past, and merged at the end.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from epdecode.errors import EnvironmentFault, NotSaved

LEAST_FREE_BYTES = 16 << 20
"""A run does not start with less room than this for its folder."""


def utc_now() -> str:
    """Now, as ISO 8601 to the second: 2026-01-31T12:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run's files."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str, digest: str) -> RunFolder:
        """Make ``root/<UTC>-<name>-<digest8>`` and prove that it can be written.

        Called by rank 0 before any rank starts work. Raises EnvironmentFault when the place cannot
        be written or has too little room. A folder that exists is left alone: -2, -3 ... follow.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "run"
        base = f"{stamp}-{safe}-{digest[:8]}"
        with _as_environment_fault(root):
            root.mkdir(parents=True, exist_ok=True)
            folder = cls(_make_new(root, base))
            folder._make_subfolders()
            _check_room(folder.path)
        return folder

    @classmethod
    def join(cls, path: Path) -> RunFolder:
        """The folder that rank 0 made, seen from another rank.

        On a host that does not share rank 0's file system it is made there too, for that host's
        logs and samples. Raises EnvironmentFault when it cannot be written.
        """
        folder = cls(path)
        with _as_environment_fault(path):
            path.mkdir(parents=True, exist_ok=True)
            folder._make_subfolders()
        return folder

    def _make_subfolders(self) -> None:
        for part in (self.log, self.trace, self.parts):
            part.mkdir(exist_ok=True)
        probe = self.path / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
        atomic_write(probe, "writable\n")
        probe.unlink()

    @property
    def config(self) -> Path:
        """Resolved config; runs again to the same digest."""
        return self.path / "config.yaml"

    @property
    def result(self) -> Path:
        """The result document."""
        return self.path / "result.json"

    @property
    def samples(self) -> Path:
        """One line a rank, pass and step."""
        return self.path / "samples.jsonl"

    @property
    def parts(self) -> Path:
        """Each rank's samples until they are merged."""
        return self.path / "samples"

    @property
    def env(self) -> Path:
        """Versions and variables by allow-list."""
        return self.path / "env.json"

    @property
    def status(self) -> Path:
        """Phase while running, exit code and cause afterwards."""
        return self.path / "status.json"

    @property
    def log(self) -> Path:
        """Logs and stack dumps of every rank."""
        return self.path / "log"

    @property
    def trace(self) -> Path:
        """Traces, when asked for."""
        return self.path / "trace"


def atomic_write(path: Path, text: str, durable: bool = True) -> None:
    """Replace ``path`` by ``text``, or leave it as it was: a reader never sees a part.

    durable: on disk before returning. Raises OSError; nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            write_all(handle, text.encode())
            if durable:
                os.fsync(handle)
        finally:
            os.close(handle)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def write_all(handle: int, data: bytes) -> None:
    """os.write until all is written. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


def save_result(folder: RunFolder, text: str, stdout: TextIO | None = None) -> Path:
    """Write result.json; when that fails, print the document so that it is not lost.

    Raises NotSaved (after printing) naming the cause. An existing result is never overwritten.
    """
    try:
        if folder.result.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder.result))
        atomic_write(folder.result, text)
    except OSError as error:
        stream = stdout or sys.stdout
        stream.write(text)
        stream.flush()
        raise NotSaved(
            f"{folder.result}: not written ({error.strerror or error}); the result was printed to "
            f"stdout instead"
        ) from error
    return folder.result


def save_json(path: Path, document: object) -> None:
    """A small JSON file, strict, written whole. Raises NotSaved, or ValueError for NaN."""
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    try:
        atomic_write(path, text)
    except OSError as error:
        raise NotSaved(f"{path}: not written: {error.strerror or error}") from error


@contextmanager
def _as_environment_fault(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"--out: {error.filename or path} cannot be written: {error.strerror or error}; "
            f"choose another folder"
        ) from error


def _make_new(root: Path, base: str) -> Path:
    for count in range(1, 1000):
        path = root / (base if count == 1 else f"{base}-{count}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(root / base))


def _check_room(path: Path) -> None:
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize
    if free < LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB free, {LEAST_FREE_BYTES >> 20} wanted")


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
