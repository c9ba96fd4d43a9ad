"""What the experts run on at each bucket: rows of an expert, backend and cut. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Literal

from epdecode.models import ModelShape
from epdecode.plan.expert_choice import Choice, ExpertShape, Spread, Table, bucket, choose, fuller
from epdecode.plan.limit_rule import Request

LEAST_CAPACITY = 64
"""Rows of the one-kernel chain's largest box: a block of an expert holds at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What a machine has to run experts with. The default: DeepGEMM, and no table."""

    table: Table = field(default_factory=dict)
    """As `epdecode bench experts --tune` wrote it."""
    deepgemm: bool = True
    """DeepGEMM is installed."""


ASSUMED = Kernels()
"""Where no machine is at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One bucket and the kernels that serve it."""

    bucket: int
    rows: int
    """Mean rows of an expert."""
    fuller_rows: int
    """Rows that few experts exceed: what the choice goes by."""
    choice: Choice
    source: Literal["rule", "table", "overlap"]
    """rule = measured on an H200; table = tuned on this machine; overlap = DeepGEMM, because the
    shared expert runs beside the routed ones (experts.py)."""


def routed_rows(request: Request, tokens: int) -> int:
    """Mean rows of an expert when every rank has ``tokens`` tokens; at least 1."""
    return max(1, -(-tokens * request.top_k * request.ep // request.num_experts))


def loads_of(
    shape: ExpertShape,
    buckets: Sequence[int],
    rows_at: Callable[[int], int],
    table: Table,
    *,
    spread: Spread,
    rival: bool,
) -> tuple[Load, ...]:
    """The choice for each bucket; without ``rival`` triton_gemm takes every one."""
    loads = []
    for tokens in buckets:
        rows = rows_at(tokens)
        most = fuller(rows, spread)
        choice = choose(shape, most, table)
        if not rival:
            choice = replace(choice, backend="triton_gemm")
        tuned = bucket(most) in table.get(shape.key, {})
        source: Literal["rule", "table"] = "table" if tuned else "rule"
        loads.append(Load(bucket=tokens, rows=rows, fuller_rows=most, choice=choice, source=source))
    return tuple(loads)


def choice_at(loads: Sequence[Load], rows: int) -> Choice:
    """The planned choice for ``rows`` rows an expert: no cut that warm-up did not compile."""
    return next((load.choice for load in loads if rows <= load.rows), loads[-1].choice)


def backends_of(loads: Sequence[Load]) -> tuple[str, ...]:
    """Each backend that some load wants, once."""
    return tuple(sorted({load.choice.backend for load in loads}))


def why_not_one_kernel(
    shape: ExpertShape, capacity: int, *, packed_scales: bool, capability: tuple[int, int]
) -> str:
    """What keeps the one-kernel chain off FP8 weights of this shape; empty when nothing does.

    The plan's view of ``experts.chains.why_not_fused``, which asks the GPU itself.
    """
    checks: Mapping[str, bool] = {
        f"compute capability {capability[0]}.{capability[1]} is not 9.x": capability[0] == 9,
        "scales are packed exponents": not packed_scales,
        f"hidden size {shape.hidden} is no multiple of 256": shape.hidden % 256 == 0,
        f"expert size {shape.size} is no multiple of 128": shape.size % 128 == 0,
        f"capacity {capacity} is no multiple of 4 from {LEAST_CAPACITY} up": (
            capacity % 4 == 0 and capacity >= LEAST_CAPACITY
        ),
    }
    return "; ".join(what for what, good in checks.items() if not good)


def shared_shape(model: ModelShape) -> ExpertShape:
    """The shared expert as a group of one."""
    return ExpertShape(experts=1, hidden=model.hidden, size=model.shared_size)


def describe(loads: Sequence[Load]) -> str:
    """Buckets -> backend and cut (where it came from), neighbours that agree together."""
    return "; ".join(_groups(loads))


def _groups(loads: Sequence[Load]) -> Iterator[str]:
    for (choice, source), group in groupby(
        loads, key=lambda load: (_words(load.choice), load.source)
    ):
        members = list(group)
        first, last = members[0].bucket, members[-1].bucket
        yield f"{first if first == last else f'{first} to {last}'}: {choice} ({source})"


def _words(choice: Choice) -> str:
    if choice.backend == "deepgemm":
        return "deepgemm"
    cut = (f"{one.name}={getattr(choice, one.name)}" for one in fields(choice))
    return " ".join(["triton_gemm", *(word for word in cut if not word.startswith("backend="))])
