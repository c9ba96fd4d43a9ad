"""``epdecode routing``: what recorded routes look like before a run replays them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from epdecode.errors import ConfigError
from epdecode.plan.placement import balanced, contiguous, imbalance, rank_loads, redundant_problem
from epdecode.routing.load import read_load
from epdecode.routing.table import Counts, LoadTable

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 64

app = typer.Typer(
    help="Look at recorded routes.", add_completion=False, pretty_exceptions_enable=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """One layer of a recording."""

    row: int
    choices: int
    experts_hit: int
    imbalance: float
    """Choices of the busiest expert over the mean."""
    rank_imbalance: float
    """The same over ranks, rank r holding the r-th block of experts."""
    balanced: tuple[float, ...]
    """The same over ranks, balanced with each number of redundant experts asked for."""
    picture: str
    """Experts by id, left to right; the highest bar is the busiest of the layer."""


@app.callback()
def _routing() -> None:
    """Keeps ``inspect`` a subcommand while it is the only one."""


@app.command(epilog="Example: epdecode routing inspect routes.npy --model deepseek-v3 --ep 32")
def inspect(
    file: Annotated[Path, typer.Argument(help="A trace or a table of counts.")],
    model: Annotated[str | None, typer.Option(help="Says how many experts there are.")] = None,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that share the experts.")] = 8,
    redundant: Annotated[
        list[int] | None, typer.Option(min=0, help="Redundant experts to try; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Imbalance of a trace or a load table, per layer and rank, as a table and a picture."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    counts = _counts(file, model)
    tried = tuple(redundant or [-counts.shape[1] % ep])
    for number in tried:
        if wrong := redundant_problem(counts.shape[1], number, ep):
            raise ConfigError(f"--redundant: {wrong}")
    layers = [look(row, layer, ep, tried) for row, layer in enumerate(counts)]
    if as_json:
        found = {"num_experts": counts.shape[1], "ep": ep, "redundant": tried}
        document = found | {"layers": [asdict(layer) for layer in layers]}
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        typer.echo(render(str(file), counts.shape[1], ep, tried, layers))


def look(row: int, load: Counts, ep: int, tried: Sequence[int]) -> LayerLoad:
    """What one layer's counts say."""
    values = [float(value) for value in load]
    spare = -len(values) % ep
    padded = [*values, *(0.0 for _ in range(spare))]
    placed = [balanced(values, number, ep) for number in tried]
    return LayerLoad(
        row=row,
        choices=int(sum(values)),
        experts_hit=sum(value > 0 for value in values),
        imbalance=imbalance(values),
        rank_imbalance=imbalance(rank_loads(contiguous(len(padded)), padded, ep)),
        balanced=tuple(imbalance(rank_loads(slots, values, ep)) for slots in placed),
        picture=picture(values),
    )


def picture(values: Sequence[float]) -> str:
    """At most 64 bars; each stands for the busiest of its experts."""
    bins = min(WIDTH, len(values))
    edges = [len(values) * edge // bins for edge in range(bins + 1)]
    tops = [max(values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    most = max(tops) or 1.0
    return "".join(BARS[math.ceil(top / most * (len(BARS) - 1))] for top in tops)


def render(
    source: str, num_experts: int, ep: int, tried: Sequence[int], layers: Sequence[LayerLoad]
) -> str:
    """The table, a line a layer, and their mean below it."""
    heads = [f"R={number}" for number in tried]
    lines = [
        f"{source}: {len(layers)} layers, {num_experts} experts; ep = {ep}",
        "imbalance = most / mean: over experts, over ranks as they are, over ranks when balanced "
        "with R redundant experts",
        f"{'layer':>5}{'choices':>11}{'hit':>6}{'experts':>9}{'ranks':>8}"
        + "".join(f"{head:>9}" for head in heads)
        + "  experts by id",
    ]
    for layer in layers:
        lines.append(
            f"{layer.row:>5}{layer.choices:>11}{layer.experts_hit:>6}{layer.imbalance:>9.2f}"
            f"{layer.rank_imbalance:>8.2f}"
            + "".join(f"{value:>9.3f}" for value in layer.balanced)
            + f"  {layer.picture}"
        )
    means = [
        sum(column) / len(layers)
        for column in zip(*(layer.balanced for layer in layers), strict=True)
    ]
    lines.append(
        f"{'mean':>5}{'':>17}{sum(layer.imbalance for layer in layers) / len(layers):>9.2f}"
        f"{sum(layer.rank_imbalance for layer in layers) / len(layers):>8.2f}"
        + "".join(f"{value:>9.3f}" for value in means)
    )
    return "\n".join(lines)


def _counts(file: Path, model: str | None) -> Counts:
    """[layers, num_experts]."""
    from epdecode.config.load import load_model

    recorded = read_load(file)
    shape = load_model(model) if model else None
    if isinstance(recorded, LoadTable):
        found = recorded.counts.shape[1]
        experts = shape.num_experts if shape else found
        if found > experts or (found < experts and not recorded.open_ended):
            raise ConfigError(f"{file}: {found} experts; {model} has {experts}")
        missing = ((0, 0), (0, experts - found))
        return np.pad(recorded.counts, missing)
    if recorded.num_tokens == 0:
        raise ConfigError(f"{file}: holds no tokens")
    largest = int(recorded.ids.max())
    experts = shape.num_experts if shape else max(1, largest + 1)
    if largest >= experts:
        raise ConfigError(f"{file}: expert {largest}; {model} has {experts}")
    return recorded.counts(experts)
