"""From raw samples to the result's timing: the headline is always the slowest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epdecode.result import WAIT_STAGES, Extremes, RankTiming, Throughput, Timing
from epdecode.result.stats import Stats, percentile

SLOW = 1.5
"""A rank is slow from this many times the median rank's busy time."""

Samples = Mapping[int, Sequence[float]]
"""Rank -> microseconds of each timed step, in order."""
StageSamples = Mapping[int, Mapping[str, Sequence[float]]]
"""Rank -> stage -> microseconds in one layer, one value per instrumented step."""


def slowest_per_step(samples: Samples) -> list[float]:
    """Per step, the slowest rank; steps that some rank did not finish are left out."""
    if not samples:
        raise ValueError("no samples: no rank finished a timed step")
    return [max(step) for step in zip(*samples.values(), strict=False)]


def build_timing(
    plain: Samples,
    layers: int,
    instrumented: Samples | None = None,
    stages: StageSamples | None = None,
) -> Timing:
    """Summarise both timed passes.

    plain: uninstrumented steps, the headline. instrumented, stages: the pass with stage stamps.
    """
    stages = stages or {}
    headline = slowest_per_step(plain)
    ranks = tuple(
        _rank_timing(rank, steps, stages.get(rank, {})) for rank, steps in sorted(plain.items())
    )
    shares = [rank.wait_share for rank in ranks if rank.wait_share is not None]
    return Timing(
        step=Stats.of(headline, "us"),
        layer=Stats.of((step / layers for step in headline), "us"),
        instrumented_step=Stats.of(slowest_per_step(instrumented), "us") if instrumented else None,
        stages=_pooled(stages),
        per_rank=ranks,
        extremes=_extremes(ranks),
        wait_share=sum(shares) / len(shares) if shares else None,
    )


def slow_ranks(timing: Timing) -> tuple[str, ...]:
    """A warning for each rank that works much longer than the middle one.

    Ranks in lockstep all take the slowest one's time; what tells them apart is how long each was
    busy, that is not waiting for peers.
    """
    busy = {
        rank.rank: sum(s.mean for stage, s in rank.stages.items() if stage not in WAIT_STAGES)
        or rank.step.p50
        for rank in timing.per_rank
    }
    middle = percentile(sorted(busy.values()), 50)
    return tuple(
        f"rank {rank} is slow: busy for {us:.1f} us, the median rank for {middle:.1f} us"
        for rank, us in busy.items()
        if us > SLOW * middle
    )


def build_throughput(tokens_per_step: float, timing: Timing) -> Throughput:
    """Tokens of all ranks per second at the headline's median."""
    return Throughput(
        tokens_per_step=tokens_per_step, tokens_per_s=tokens_per_step / timing.step.p50 * 1e6
    )


def _rank_timing(
    rank: int, steps: Sequence[float], stages: Mapping[str, Sequence[float]]
) -> RankTiming:
    stats = {stage: Stats.of(values, "us") for stage, values in stages.items() if values}
    total = sum(stat.mean for stat in stats.values())
    waits = sum(stats[stage].mean for stage in WAIT_STAGES if stage in stats)
    return RankTiming(
        rank=rank,
        step=Stats.of(steps, "us"),
        stages=stats,
        wait_share=waits / total if total > 0 else None,
    )


def _pooled(stages: StageSamples) -> dict[str, Stats]:
    pooled: dict[str, list[float]] = {}
    for of_rank in stages.values():
        for stage, values in of_rank.items():
            pooled.setdefault(stage, []).extend(values)
    return {stage: Stats.of(values, "us") for stage, values in pooled.items() if values}


def _extremes(ranks: Sequence[RankTiming]) -> Extremes:
    fastest = min(ranks, key=lambda rank: rank.step.p50)
    slowest = max(ranks, key=lambda rank: rank.step.p50)
    return Extremes(
        fastest_rank=fastest.rank,
        fastest_us_p50=fastest.step.p50,
        slowest_rank=slowest.rank,
        slowest_us_p50=slowest.step.p50,
    )
