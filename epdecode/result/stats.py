"""A measured quantity in nine figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """One measured quantity. Percentiles interpolate linearly between the closest samples."""

    unit: str
    n: int
    mean: float
    std: float
    """Population standard deviation."""
    min: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float], unit: str) -> Stats:
        """Summarise at least one finite value."""
        ordered = sorted(float(value) for value in values)
        if not ordered:
            raise ValueError(f"Stats.of: no values ({unit})")
        bad = [value for value in ordered if not math.isfinite(value)]
        if bad:
            raise ValueError(f"Stats.of: {len(bad)} of {len(ordered)} values not finite ({unit})")
        mean = math.fsum(ordered) / len(ordered)
        variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
        return cls(
            unit=unit,
            n=len(ordered),
            mean=mean,
            std=math.sqrt(variance),
            min=ordered[0],
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            max=ordered[-1],
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value ``percent`` of the way through ``ordered`` (ascending, not empty)."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
