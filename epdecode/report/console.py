"""The result as tables for a terminal of 80 columns or more; plain text when it is not one."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from epdecode.result import STAGES, Floor, Result
from epdecode.result.stats import Stats

PLAIN_WIDTH = 100


def print_report(result: Result, stream: TextIO | None = None) -> None:
    """Write the tables to ``stream`` (stdout), before the last line of JSON."""
    stream = stream or sys.stdout
    print_plainly(render(result), stream)
    stream.flush()


def print_plainly(content: RenderableType, stream: TextIO) -> None:
    """In colour on a terminal; elsewhere plain, 100 columns, without trailing spaces."""
    if stream.isatty():
        Console(file=stream, highlight=False).print(content)
        return
    text = io.StringIO()
    Console(file=text, width=PLAIN_WIDTH, highlight=False).print(content)
    stream.writelines(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def render(result: Result) -> RenderableType:
    """All sections that the result has figures for."""
    return Group(*_sections(result))


def _sections(result: Result) -> Iterator[RenderableType]:
    yield _heading(result)
    if result.timing:
        yield _stage_table(result)
    yield _facts(result)
    if result.memory:
        yield _memory_table(result)
    for warning in result.warnings:
        yield Text(f"warning: {warning}", style="yellow")


def _heading(result: Result) -> Text:
    method = result.method
    colour = {"passed": "bold green", "degraded": "bold yellow", "interrupted": "bold yellow"}
    heading = Text()
    heading.append(result.status.upper(), style=colour.get(result.status, "bold red"))
    heading.append(f"  {result.name}", style="bold")
    heading.append(
        f"\n{method.world_size} rank(s), {method.layers} layer(s), "
        f"{method.tokens_per_rank} tokens per rank; {method.transport} ({method.wire}), "
        f"{method.experts}, graphs {'on' if method.graph else 'off'}; "
        f"{result.provenance.gpu or 'CPU'}"
    )
    if method.shared_gpu:
        heading.append("\nranks share a GPU: correctness only, no speed", style="yellow")
    elif not result.provenance.gpu:
        heading.append("\nno GPU: the times say nothing about one", style="yellow")
    if result.cause:
        heading.append(f"\n{result.cause.kind}: {result.cause.message}", style="red")
    return heading


def _stage_table(result: Result) -> Table:
    timing = result.timing
    assert timing is not None, "the caller has looked"
    floor = bool(result.floors or result.layer_floor)
    table = Table(title="microseconds in one layer, all ranks", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for name in ("p50", "p90", "p99", "share") + (("floor", "reached") if floor else ()):
        table.add_column(name, justify="right", no_wrap=True)
    total = sum(stats.mean for stats in timing.stages.values())
    for stage in sorted(timing.stages, key=_stage_order):
        stats = timing.stages[stage]
        share = f"{stats.mean / total:.1%}" if total else ""
        table.add_row(*_cells(stage, stats, share, result.floors.get(stage), floor))
    table.add_section()
    table.add_row(*_cells("layer", timing.layer, "", result.layer_floor, floor), style="bold")
    table.add_row(*_cells("step", timing.step, "", None, floor), style="bold")
    if timing.instrumented_step:
        table.add_row(*_cells("step, with stamps", timing.instrumented_step, "", None, floor))
    return table


def _cells(name: str, stats: Stats, share: str, floor: Floor | None, floors: bool) -> list[str]:
    cells = [name, *(figure(value) for value in (stats.p50, stats.p90, stats.p99)), share]
    if floors:
        fraction = floor.fraction if floor else None
        cells += [
            figure(floor.floor_us) if floor else "",
            "" if fraction is None else f"{fraction:.0%}",
        ]
    return cells


def _facts(result: Result) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts(result).items():
        table.add_row(name, text)
    return table


def facts(result: Result) -> Mapping[str, str]:
    """Named one-line facts; the HTML page shows the same."""
    lines: dict[str, str] = {}
    if result.throughput:
        lines["throughput"] = f"{result.throughput.tokens_per_s:,.0f} tokens/s, all ranks"
    timing = result.timing
    if timing and len(timing.per_rank) > 1:
        extremes = timing.extremes
        lines["ranks, step p50"] = (
            f"slowest {extremes.slowest_rank}: {figure(extremes.slowest_us_p50)} us, "
            f"fastest {extremes.fastest_rank}: {figure(extremes.fastest_us_p50)} us"
        )
    if timing and timing.wait_share is not None:
        lines["waiting for peers"] = f"{timing.wait_share:.1%} of the layer"
    if result.first_call_us is not None:
        lines["first call"] = f"{figure(result.first_call_us)} us, in no other figure"
    if result.expert_load:
        load = result.expert_load
        lines["expert load"] = (
            f"max {figure(load.max)}, mean {figure(load.mean)} rows; imbalance {load.imbalance:.2f}"
        )
    if result.packed_rows:
        packed = result.packed_rows
        lines["packed rows"] = (
            f"{figure(packed.rows)} of {figure(packed.aligned_rows)} in aligned blocks; buffers "
            f"hold {packed.planned_rows:,}, {packed.buffer_bytes / 2**20:,.1f} MiB"
        )
    return lines | _outcome_facts(result)


def _outcome_facts(result: Result) -> dict[str, str]:
    lines: dict[str, str] = {}
    if result.step_counts:
        counts = result.step_counts
        lines["steps"] = f"{counts.graph} graph, {counts.eager} eager, {counts.skipped} skipped"
    if result.verification:
        check = result.verification
        worst = "not finite" if check.worst_error is None else f"{check.worst_error:.2e}"
        lines["verification"] = (
            f"{'passed' if check.passed else 'FAILED'}: {check.rows} rows against "
            f"{check.reference}; worst {worst} (row {check.worst_row}), "
            f"tolerance {check.tolerance:.2e}; {check.routes_differing} routes differ"
        )
    if result.non_finite and any(result.non_finite.counts.values()):
        bad = result.non_finite
        lines["non-finite"] = (
            f"{sum(bad.counts.values())} values; first at rank {bad.first_rank}, step "
            f"{bad.first_step}, stage {bad.first_stage}, expert {bad.first_expert}"
        )
    return lines


def _memory_table(result: Result) -> Table:
    table = Table(title="memory, MiB, fullest rank", title_justify="left")
    table.add_column("category")
    table.add_column("planned", justify="right")
    table.add_column("peak", justify="right")
    for category, use in result.memory.items():
        peak = "" if use.peak is None else figure(use.peak / 2**20)
        style = "bold" if category == "total" else None
        table.add_row(category, figure(use.planned / 2**20), peak, style=style)
    return table


def figure(value: float) -> str:
    """Four significant digits, thousands separated, never an exponent."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.01 or value == 0 else f"{value:.4f}"


def _stage_order(stage: str) -> tuple[int, str]:
    return (STAGES.index(stage) if stage in STAGES else len(STAGES), stage)
