"""``epdecode report`` and ``epdecode compare``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from epdecode.errors import ConfigError, NotSaved
from epdecode.report.compare import as_json, compare, table
from epdecode.report.console import print_plainly, print_report
from epdecode.report.html import page
from epdecode.report.prometheus import metrics
from epdecode.result import Result
from epdecode.result.document import from_json
from epdecode.result.samples import read_samples
from epdecode.result.save import RunFolder, atomic_write

RunDir = Annotated[Path, typer.Argument(help="Run folder, or its result.json.")]


def report_command(
    run_dir: RunDir,
    html: Annotated[
        bool, typer.Option("--html", help="Write report.html into the folder.")
    ] = False,
    prometheus: Annotated[
        Path | None, typer.Option(help="Write a Prometheus text file (*.prom).")
    ] = None,
) -> None:
    """Print a result as tables, or write it as a page or as metrics."""
    result, folder = _load(run_dir)
    if html:
        path = folder.path / "report.html"
        _write(path, page(result, read_samples(folder)))
        sys.stdout.write(f"{path}\n")
    if prometheus:
        _write(prometheus, metrics(result))
        sys.stdout.write(f"{prometheus}\n")
    if not html and not prometheus:
        print_report(result)


def compare_command(
    run_dirs: Annotated[list[Path], typer.Argument(help="Two or more run folders.")],
    force: Annotated[bool, typer.Option("--force", help="Also when the work differs.")] = False,
    as_document: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put results side by side with the first; refuse unlike work, naming the keys."""
    named = [(_name(path, run_dirs), _load(path)[0]) for path in run_dirs]
    comparison = compare(named, force)
    if as_document:
        sys.stdout.write(json.dumps(as_json(comparison), indent=2, allow_nan=False) + "\n")
        return
    print_plainly(table(comparison), sys.stdout)


def _load(path: Path) -> tuple[Result, RunFolder]:
    folder = RunFolder(path if path.is_dir() else path.parent)
    file = folder.result if path.is_dir() else path
    try:
        return from_json(file.read_text(), str(file)), folder
    except OSError as error:
        hint = "; `epdecode status` says how the run ended" if folder.status.exists() else ""
        raise ConfigError(f"{file}: {error.strerror}{hint}") from error


def _name(path: Path, paths: list[Path]) -> str:
    """Short, but different for different runs."""
    names = [other.resolve().name for other in paths]
    name = path.resolve().name
    return name if names.count(name) == 1 else str(path)


def _write(path: Path, text: str) -> None:
    try:
        atomic_write(path, text)
    except OSError as error:
        raise NotSaved(f"{path}: not written: {error.strerror or error}") from error
