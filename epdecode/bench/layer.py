"""`epdecode bench layer`: the layer over batch sizes, each a whole verified run of the main job."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from epdecode.bench.job import run_job, show
from epdecode.errors import ConfigError
from epdecode.result import Result

TOKENS = "8,32,64,128"


@dataclass(frozen=True, slots=True)
class Line:
    """One batch size; microseconds, None where there is no speed to report."""

    tokens: int
    status: str
    layer_us: float | None = None
    floor_us: float | None = None
    fraction: float | None = None
    worst_error: float | None = None
    result: str | None = None


def layer(
    config: Annotated[str, typer.Option("--config", "-c", help="A YAML file or a preset.")],
    override: Annotated[
        list[str] | None, typer.Argument(help="a.b=value, for every size alike.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens per rank, comma-separated.")] = TOKENS,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on this node.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run the layer once per batch size, captured for that size alone, beside its floor.

    Example: `epdecode bench layer -c deepseek_v3-h200-ep8_share model=deepseek-v3-routed`.
    """
    lines = []
    for size in parse_tokens(tokens):
        words = (f"batch.tokens_per_rank={size}", f"batch.buckets=[{size}]", *(override or ()))
        lines.append(_line(size, *run_job(config, words, ranks, out)))
    document = {"config": config, "ranks": ranks, "lines": [asdict(line) for line in lines]}
    show(table(lines), document if as_json else None, [line.status for line in lines])


def parse_tokens(text: str) -> list[int]:
    """``8,32`` -> [8, 32]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--tokens: got {text!r}, accepted: whole numbers such as {TOKENS}")
    return [int(part) for part in parts]


def _line(tokens: int, status: str, result: Result | None, path: str | None) -> Line:
    if not (result and status == "passed"):
        return Line(tokens, status, result=path)
    floor, checked = result.layer_floor, result.verification
    return Line(
        tokens=tokens,
        status=status,
        layer_us=result.timing.layer.p50 if result.timing else None,
        floor_us=floor.floor_us if floor else None,
        fraction=floor.fraction if floor else None,
        worst_error=checked.worst_error if checked else None,
        result=path,
    )


def table(lines: list[Line]) -> Table:
    """One row a batch size."""
    made = Table(title="layer p50 by tokens per rank", title_justify="left")
    for column in ("tokens", "us", "floor us", "reached", "worst error"):
        made.add_column(column, justify="right")
    made.add_column("verified", overflow="fold")
    for line in lines:
        made.add_row(
            str(line.tokens),
            "" if line.layer_us is None else f"{line.layer_us:,.1f}",
            "" if line.floor_us is None else f"{line.floor_us:,.1f}",
            "" if line.fraction is None else f"{line.fraction:.0%}",
            "" if line.worst_error is None else f"{line.worst_error:.4f}",
            line.status,
        )
    return made
