"""The result as one HTML file that needs nothing else: no server, no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml

from epdecode.report.console import facts, figure
from epdecode.result import STAGES, WAIT_STAGES, Result

HERE = Path(__file__).parent
MOST_POINTS = 2000
"""Steps are thinned to this many points, each the slowest of its neighbours."""
MOST_LINES = 8
"""Ranks drawn one by one; of more, the slowest and the fastest."""
COMMUNICATION = ("dispatch_send", "combine_send")


@dataclass(frozen=True, slots=True)
class Bar:
    """One stage's row: microseconds, and widths in percent of the longest bar."""

    stage: str
    kind: str
    """compute, communication or waiting."""
    p50: str
    p90: str
    p99: str
    share: str
    width: float
    width_p99: float
    floor: str
    floor_at: float | None
    fraction: str


def page(result: Result, samples: Iterable[Mapping[str, Any]]) -> str:
    """The whole file as text. samples: lines of samples.jsonl, for the steps over time."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["figure"] = lambda value: "" if value is None else figure(value)
    template = environment.get_template("report.html.j2")
    return template.render(
        result=result,
        facts=facts(result),
        bars=_bars(result),
        ranks=_ranks(result),
        charts=[] if result.method.shared_gpu else _charts(result, samples),
        config=yaml.safe_dump(_plain(result.config), sort_keys=False),
        plan=yaml.safe_dump(_plain(result.plan), sort_keys=False),
        provenance=yaml.safe_dump(_plain(asdict(result.provenance)), sort_keys=False),
        uplot_js=(HERE / "static" / "uPlot.iife.min.js").read_text(),
        uplot_css=(HERE / "static" / "uPlot.min.css").read_text(),
    )


def _bars(result: Result) -> list[Bar]:
    timing = result.timing
    if timing is None or not timing.stages:
        return []
    longest = max(
        *(stats.p99 for stats in timing.stages.values()),
        *(floor.floor_us for floor in result.floors.values()),
        1e-3,
    )
    total = sum(stats.mean for stats in timing.stages.values()) or 1.0
    bars = []
    for stage in sorted(timing.stages, key=lambda name: (*STAGES, name).index(name)):
        stats, floor = timing.stages[stage], result.floors.get(stage)
        fraction = floor.fraction if floor else None
        bars.append(
            Bar(
                stage=stage,
                kind=_kind(stage),
                p50=figure(stats.p50),
                p90=figure(stats.p90),
                p99=figure(stats.p99),
                share=f"{stats.mean / total:.1%}",
                width=100 * stats.p50 / longest,
                width_p99=100 * stats.p99 / longest,
                floor=figure(floor.floor_us) if floor else "",
                floor_at=100 * floor.floor_us / longest if floor else None,
                fraction="" if fraction is None else f"{fraction:.0%}",
            )
        )
    return bars


def _kind(stage: str) -> str:
    if stage in WAIT_STAGES:
        return "waiting"
    return "communication" if stage in COMMUNICATION else "compute"


def _ranks(result: Result) -> list[dict[str, str]]:
    places = {place.rank: place for place in result.provenance.ranks}
    if result.timing is None:
        return []
    rows = []
    for rank in result.timing.per_rank:
        place = places.get(rank.rank)
        rows.append(
            {
                "rank": str(rank.rank),
                "host": place.host if place else "",
                "device": place.device if place else "",
                "p50": figure(rank.step.p50),
                "p99": figure(rank.step.p99),
                "wait": "" if rank.wait_share is None else f"{rank.wait_share:.1%}",
            }
        )
    return rows


def _charts(result: Result, samples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Data for uPlot: x, then one list a series."""
    charts = []
    by_rank: dict[int, dict[int, float]] = {}
    for sample in samples:
        if sample.get("pass") == "plain":
            by_rank.setdefault(int(sample["rank"]), {})[int(sample["step"])] = float(sample["us"])
    if by_rank:
        charts.append(_steps_chart(by_rank, result))
    timing = result.timing
    if timing and len(timing.per_rank) > 1:
        charts.append(
            {
                "title": "Step by rank, microseconds",
                "x": "rank",
                "series": ["p50", "p99"],
                "points": True,
                "data": [
                    [rank.rank for rank in timing.per_rank],
                    [rank.step.p50 for rank in timing.per_rank],
                    [rank.step.p99 for rank in timing.per_rank],
                ],
            }
        )
    return charts


def _steps_chart(by_rank: Mapping[int, Mapping[int, float]], result: Result) -> dict[str, Any]:
    shown = sorted(by_rank)
    if len(shown) > MOST_LINES and result.timing:
        extremes = result.timing.extremes
        shown = sorted({extremes.fastest_rank, extremes.slowest_rank} & set(shown))
    steps = sorted({step for rank in shown for step in by_rank[rank]})
    size = -(-len(steps) // MOST_POINTS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    lines = [
        [
            max((by_rank[rank][s] for s in group if s in by_rank[rank]), default=None)
            for group in groups
        ]
        for rank in shown
    ]
    title = "Steps over time, microseconds"
    if size > 1:
        title += f" (each point the slowest of {size} steps)"
    return {
        "title": title,
        "x": "step",
        "series": [f"rank {rank}" for rank in shown],
        "points": False,
        "data": [[group[0] for group in groups], *lines],
    }


def _slowest(of_rank: Mapping[int, float], steps: Iterable[int]) -> float | None:
    return max((of_rank[step] for step in steps if step in of_rank), default=None)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
