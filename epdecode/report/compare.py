"""Results side by side, with ratios; unlike workloads are not compared unless asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from epdecode.errors import ConfigError
from epdecode.report.console import figure
from epdecode.result import STAGES, Result

SUBJECT = ("transport", "experts", "graph", "overlap", "limits", "run", "debug")
"""Config keys that comparisons are about, or that do not change the work."""

SPEEDS = ("step p50", "step p99", "layer p50", "waiting, share", "tokens/s", "share of floor")
CHECKS = ("memory, MiB", "expert imbalance", "worst error")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of every result; None where a result does not have it."""

    name: str
    values: tuple[float | None, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Each against the first; below 1 = smaller than the first's."""
        first = self.values[0]
        return tuple(None if value is None or not first else value / first for value in self.values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared and how it came out."""

    names: tuple[str, ...]
    results: tuple[Result, ...]
    unlike: Mapping[str, tuple[str, ...]]
    """Keys of the workload in which the results differ."""
    settings: Mapping[str, tuple[str, ...]]
    """Keys the comparison is about in which they differ."""
    rows: tuple[Row, ...]


def compare(named: Sequence[tuple[str, Result]], force: bool = False) -> Comparison:
    """Compare at least two results with the first.

    Raises ConfigError naming the keys when they did not do the same work, unless forced.
    """
    if len(named) < 2:
        raise ConfigError(f"compare: got {len(named)} run, accepted: two or more")
    names, results = tuple(name for name, _ in named), tuple(result for _, result in named)
    unlike = _differences([_workload(result) for result in results])
    if unlike and not force:
        listed = "; ".join(f"{key}: {' / '.join(values)}" for key, values in unlike.items())
        raise ConfigError(f"the runs did not do the same work ({listed}); --force compares anyway")
    return Comparison(
        names=names,
        results=results,
        unlike=unlike,
        settings=_differences([_settings(result) for result in results]),
        rows=tuple(_rows(results)),
    )


def table(comparison: Comparison) -> Table:
    """For the console."""
    made = Table(title="against the first; microseconds unless named", title_justify="left")
    made.add_column("", no_wrap=True)
    for name in comparison.names:
        made.add_column(name, justify="right", overflow="fold")
    made.add_row("status", *(result.status for result in comparison.results))
    for key, values in {**comparison.unlike, **comparison.settings}.items():
        style = "yellow" if key in comparison.unlike else None
        made.add_row(key, *values, style=style)
    made.add_section()
    for row in comparison.rows:
        cells = []
        for index, (value, ratio) in enumerate(zip(row.values, row.ratios, strict=True)):
            times = f"  x{ratio:.3f}" if index and ratio is not None else ""
            cells.append("-" if value is None else figure(value) + times)
        made.add_row(row.name, *cells)
    return made


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The same for programs."""
    return {
        "runs": list(comparison.names),
        "status": [result.status for result in comparison.results],
        "unlike": {key: list(values) for key, values in comparison.unlike.items()},
        "settings": {key: list(values) for key, values in comparison.settings.items()},
        "figures": {
            row.name: {"values": list(row.values), "ratios": list(row.ratios)}
            for row in comparison.rows
        },
    }


def _rows(results: Sequence[Result]) -> Iterator[Row]:
    columns = [{**_speeds(result), **_checks(result)} for result in results]
    order = [*SPEEDS, *(f"{stage} p50" for stage in STAGES), *CHECKS]
    for name in order:
        values = tuple(column.get(name) for column in columns)
        if any(value is not None for value in values):
            yield Row(name, values)


def _speeds(result: Result) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    if result.status != "passed" or result.method.shared_gpu:
        return figures
    if result.timing:
        timing = result.timing
        spans = (timing.step.p50, timing.step.p99, timing.layer.p50, timing.wait_share)
        figures |= dict(zip(SPEEDS, spans, strict=False))
        figures |= {f"{stage} p50": stats.p50 for stage, stats in timing.stages.items()}
    if result.throughput:
        figures["tokens/s"] = result.throughput.tokens_per_s
    if result.layer_floor:
        figures["share of floor"] = result.layer_floor.fraction
    return figures


def _checks(result: Result) -> dict[str, float | None]:
    use, load, check = result.memory.get("total"), result.expert_load, result.verification
    return {
        "memory, MiB": (use.peak or use.planned) / 2**20 if use else None,
        "expert imbalance": load.imbalance if load else None,
        "worst error": check.worst_error if check else None,
    }


def _workload(result: Result) -> dict[str, str]:
    keys = {key: value for key, value in result.config.items() if key not in SUBJECT}
    return {
        **_flat(keys),
        "world_size": str(result.method.world_size),
        "gpu": str(result.provenance.gpu or "none"),
        "shared_gpu": str(result.method.shared_gpu),
    }


def _settings(result: Result) -> dict[str, str]:
    keys = {key: value for key, value in result.config.items() if key in SUBJECT}
    method = result.method
    chosen = {"method.experts": method.experts, "method.graph": str(method.graph)}
    return {**_flat(keys), **chosen, "commit": str(result.provenance.commit)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def _differences(trees: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    found = {}
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = tuple(tree.get(key, "(absent)") for tree in trees)
        if len(set(values)) > 1:
            found[key] = values
    return found
