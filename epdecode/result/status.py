"""status.json: the truth about a run, which torchrun's exit code is not."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from pydantic import TypeAdapter, ValidationError

from epdecode.errors import ConfigError, Exit
from epdecode.result import Cause
from epdecode.result.save import atomic_write, utc_now

Phase = Literal["join", "load", "warmup", "steps", "report", "done"]

REFRESH_S = 10.0
"""A running rank rewrites its status at least this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The document ``epdecode.status/1``."""

    schema: Literal["epdecode.status/1"] = "epdecode.status/1"
    phase: Phase
    step: int | None = None
    exit_code: int | None = None
    """null while running."""
    cause: Cause | None = None
    """Why exit_code is not 0."""
    stopped_by: int | None = None
    """Rank that wrote the end: 0, or the lowest survivor."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    pid_started: float = field(default_factory=lambda: psutil.Process().create_time())
    """Seconds since the epoch; tells the process from a later one with its number."""
    updated_utc: str = field(default_factory=utc_now)
    updated: float = field(default_factory=time.time)
    """Seconds since the epoch."""


def write_status(path: Path, status: Status, durable: bool = True) -> None:
    """Replace status.json. Raises OSError."""
    text = json.dumps(asdict(status), indent=2, allow_nan=False) + "\n"
    atomic_write(path, text, durable)


def read_status(path: Path) -> Status:
    """Read ``path``, a run folder or its status.json. Raises ConfigError."""
    path = path / "status.json" if path.is_dir() else path
    try:
        return TypeAdapter(Status).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a run folder") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: not a status document: {error.errors()[0]['msg']}") from error


def verdict(status: Status) -> Status:
    """The status as it stands now: one whose writer is gone without an end is a lost run."""
    if status.exit_code is not None or _writer_lives(status):
        return status
    cause = Cause(
        kind="killed",
        rank=None,
        host=status.host,
        step=status.step,
        message=(
            f"process {status.pid} on {status.host} is gone and left no end in status.json: every "
            f"rank was killed at once, or the host went down"
        ),
    )
    return replace(status, exit_code=int(Exit.RANK_LOST), cause=cause)


def describe(status: Status) -> str:
    """A few lines for people."""
    where = status.phase if status.step is None else f"{status.phase}, step {status.step}"
    if status.exit_code is None:
        return f"running: {where} (updated {status.updated_utc})"
    lines = [f"exit {status.exit_code} ({_exit_name(status.exit_code)}) in {where}"]
    if status.cause:
        cause = status.cause
        places = {"rank": cause.rank, "host": cause.host, "step": cause.step, "stage": cause.stage}
        known = ", ".join(f"{key} {value}" for key, value in places.items() if value is not None)
        lines.append(f"cause: {cause.kind}" + (f" ({known})" if known else ""))
        lines.append(cause.message)
    return "\n".join(lines)


def status_command(
    run_dir: Annotated[Path, typer.Argument(help="Run folder, or its status.json.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the document.")] = False,
) -> None:
    """Print how a run ended (or how far it is) and exit with its code; 0 while it runs."""
    status = verdict(read_status(run_dir))
    text = json.dumps(asdict(status), indent=2) if as_json else describe(status)
    sys.stdout.write(text + "\n")
    raise typer.Exit(status.exit_code or 0)


def _exit_name(code: int) -> str:
    return Exit(code).name.lower().replace("_", " ") if code in set(Exit) else "unknown"


def _writer_lives(status: Status) -> bool:
    """On this host the process itself is asked, elsewhere the age of the file."""
    if status.host != socket.gethostname():
        return time.time() - status.updated < 6 * REFRESH_S
    try:
        process = psutil.Process(status.pid)
        return bool(
            abs(process.create_time() - status.pid_started) < 1
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False
