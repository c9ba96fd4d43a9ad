"""`epdecode bench ladder`: what each improvement is worth, in the layer, one change at a time.

Every rung is a whole run of the main job with the same seeds, so the same weights, batches and
routes, verified like any other; only the switches differ.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from epdecode.bench.job import run_job, show
from epdecode.result import Result


@dataclass(frozen=True, slots=True)
class Rung:
    """One change and the overrides that turn it on, or off below it."""

    name: str
    on: tuple[str, ...]
    off: tuple[str, ...]


RUNGS = (
    Rung("plain torch between the GEMMs, BF16 wire", (), ()),
    Rung("FP8 in dispatch", ("transport.wire=fp8",), ("transport.wire=bf16",)),
    Rung(
        "fused activation and quantisation, valid rows only",
        ("experts.fused_activation=true",),
        ("experts.fused_activation=false",),
    ),
    Rung(
        "scales in the GEMM's layout in the same pass",
        ("experts.fused_quant_layout=true",),
        ("experts.fused_quant_layout=false",),
    ),
    Rung("CUDA graph", ("graph.enabled=true",), ("graph.enabled=false",)),
    Rung("balanced routing", ("routing.kind=balanced",), ("routing.kind=uniform",)),
)
"""From the bottom: a rung keeps all below it on and all above it off."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rung as it ran; times in microseconds, None where there is no speed to report."""

    name: str
    overrides: tuple[str, ...]
    status: str
    layer_us: float | None = None
    speed_up: float | None = None
    """Over the first rung that has a time."""
    moved: str | None = None
    """The stage whose time changed most against the rung before."""
    moved_us: float | None = None
    result: str | None = None


def overrides_of(index: int, graphs: bool) -> tuple[str, ...]:
    """The switches of rung ``index``; graphs: captured on every rung, not from its own on."""
    words: list[str] = []
    for number, rung in enumerate(RUNGS):
        on = number <= index or (graphs and rung.name == "CUDA graph")
        words += rung.on if on else rung.off
    return tuple(words)


def ladder(
    config: Annotated[str, typer.Option("--config", "-c", help="A YAML file or a preset.")],
    override: Annotated[
        list[str] | None, typer.Argument(help="a.b=value, for every rung alike.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on this node.")] = 1,
    graphs: Annotated[bool, typer.Option(help="Capture graphs on every rung.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the rungs' run folders.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run the layer rung by rung, from plain torch to everything fused, and compare.

    A rung that the config's backends cannot take is named with the reason and left out. Example:
    `epdecode bench ladder -c deepseek_v3-h200-ep8_share --graphs run.steps=30`.
    """
    given = tuple(override or ())
    steps: list[Step] = []
    before: Result | None = None
    for index in _distinct(graphs):
        words = overrides_of(index, graphs)
        status, result, path = run_job(config, (*words, *given), ranks, out)
        steps.append(_step(RUNGS[index].name, words, status, result, path, (steps, before)))
        before = result or before
    document = {"config": config, "ranks": ranks, "rungs": [asdict(step) for step in steps]}
    show(table(steps), document if as_json else None, [step.status for step in steps])


def _distinct(graphs: bool) -> list[int]:
    return [i for i, rung in enumerate(RUNGS) if not (graphs and rung.name == "CUDA graph")]


def _step(
    name: str,
    overrides: tuple[str, ...],
    status: str,
    result: Result | None,
    path: str | None,
    earlier: tuple[list[Step], Result | None],
) -> Step:
    steps, before = earlier
    layer = result.timing.layer.p50 if result and result.timing and status == "passed" else None
    first = next((step.layer_us for step in steps if step.layer_us), layer)
    stage, change = _moved(result, before)
    return Step(
        name=name,
        overrides=overrides,
        status=status,
        layer_us=layer,
        speed_up=first / layer if first and layer else None,
        moved=stage,
        moved_us=change,
        result=path,
    )


def _moved(result: Result | None, before: Result | None) -> tuple[str | None, float | None]:
    if not (result and before and result.timing and before.timing):
        return None, None
    old = before.timing.stages
    changes = {
        stage: stats.p50 - old[stage].p50
        for stage, stats in result.timing.stages.items()
        if stage in old
    }
    stage = max(changes, key=lambda one: abs(changes[one]), default=None)
    return stage, changes[stage] if stage else None


def table(steps: list[Step]) -> Table:
    """The rungs from the bottom up."""
    made = Table(title="one change at a time, layer p50", title_justify="left")
    made.add_column("rung", overflow="fold")
    for column in ("us", "speed-up", "stage that moved"):
        made.add_column(column, justify="right")
    made.add_column("verified", overflow="fold")
    for step in steps:
        made.add_row(
            step.name,
            "" if step.layer_us is None else f"{step.layer_us:,.1f}",
            "" if step.speed_up is None else f"{step.speed_up:.2f}x",
            "" if step.moved is None else f"{step.moved} {step.moved_us:+,.1f}",
            step.status,
        )
    return made
