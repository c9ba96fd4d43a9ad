"""The main job as a child of a bench: run, its result read back, and many of them shown."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from epdecode.errors import Exit
from epdecode.result import Result
from epdecode.result.document import from_json


def run_job(
    config: str, overrides: tuple[str, ...], ranks: int, out: Path
) -> tuple[str, Result | None, str | None]:
    """Run it with ``ranks`` ranks on this node: status (or why it did not run), result, its path.

    out: folder of the run folder.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "epdecode.run"]
    done = subprocess.run(
        [*command, "--config", config, "--out", str(out), *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        line = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return f"ended with {done.returncode}: {done.stderr[-300:].strip()}", None, None
    if not line.get("result"):
        cause = line.get("cause") or {}
        return f"not here: {cause.get('message', 'no cause given')}", None, None
    path = line["result"]
    return line["status"], from_json(Path(path).read_text(), path), path


def show(table: Table, document: dict[str, Any] | None, statuses: Sequence[str]) -> None:
    """Print the document where there is one, else the table.

    Raises typer.Exit when a run's numbers were wrong, or when none passed.
    """
    if document is None:
        Console().print(table)
    else:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    if "wrong" in statuses:
        raise typer.Exit(Exit.WRONG_NUMBERS)
    if "passed" not in statuses:
        raise typer.Exit(Exit.CONFIG)
