"""The result as a Prometheus text file, for node_exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from epdecode.result import Result
from epdecode.result.stats import Stats

QUANTILES = {"0.5": "p50", "0.9": "p90", "0.99": "p99"}


@dataclass(frozen=True, slots=True)
class _Sample:
    name: str
    about: str
    labels: tuple[tuple[str, str], ...]
    value: float


def metrics(result: Result) -> str:
    """Every figure that the result has, seconds and bytes; no speed that does not count."""
    method = result.method
    common = {
        "config": result.name,
        "transport": method.transport,
        "experts": method.experts,
        "world_size": str(method.world_size),
    }
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for sample in _samples(result):
        labels = {**common, **dict(sample.labels)}
        if sample.name not in gauges:
            name = f"epdecode_{sample.name}"
            gauges[sample.name] = Gauge(name, sample.about, list(labels), registry=registry)
        gauges[sample.name].labels(**labels).set(sample.value)
    return generate_latest(registry).decode()


def _samples(result: Result) -> Iterator[_Sample]:
    yield _Sample("passed", "1 if the run passed, else 0", (), float(result.status == "passed"))
    if result.status == "passed":
        yield from _speeds(result)
    for category, use in result.memory.items():
        labels = (("category", category),)
        yield _Sample("memory_planned_bytes", "Planned, fullest rank", labels, use.planned)
        if use.peak is not None:
            yield _Sample("memory_peak_bytes", "Taken, fullest rank", labels, use.peak)
    if result.expert_load:
        imbalance = result.expert_load.imbalance
        yield _Sample("expert_imbalance", "Most rows of an expert / mean", (), imbalance)
    if result.verification and result.verification.worst_error is not None:
        check = result.verification
        about = "Worst row against the reference, relative"
        yield _Sample("verification_worst_error", about, (), result.verification.worst_error)
        yield _Sample("verification_tolerance", "Accepted error", (), check.tolerance)


def _speeds(result: Result) -> Iterator[_Sample]:
    if result.timing:
        yield from _quantiles("step_seconds", "One step, slowest rank", result.timing.step)
        yield from _quantiles("layer_seconds", "One layer, slowest rank", result.timing.layer)
        for stage, stats in result.timing.stages.items():
            yield from _quantiles("stage_seconds", "One stage of a layer", stats, ("stage", stage))
    if result.throughput:
        rate = result.throughput.tokens_per_s
        yield _Sample("tokens_per_second", "Tokens of all ranks, all layers", (), rate)
    if result.layer_floor and result.layer_floor.fraction is not None:
        fraction = result.layer_floor.fraction
        yield _Sample("layer_floor_fraction", "Hardware floor / measured", (), fraction)


def _quantiles(name: str, about: str, stats: Stats, *labels: tuple[str, str]) -> Iterator[_Sample]:
    for quantile, field in QUANTILES.items():
        seconds = getattr(stats, field) / 1e6
        yield _Sample(name, about, (*labels, ("quantile", quantile)), seconds)
