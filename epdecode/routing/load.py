"""How much each expert gets under a routing kind: what routes are drawn by and placement balances.

Without torch, since the plan depends on it. All figures are relative: only ratios count.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from epdecode.config import Config, RoutingConfig
from epdecode.config.load import find_beside
from epdecode.errors import ConfigError
from epdecode.models import ModelShape
from epdecode.models.layers import LoopLayer, recorded_rows
from epdecode.routing import table as routing_table
from epdecode.routing import trace as routing_trace
from epdecode.routing.table import Counts, LoadTable, read_load_table
from epdecode.routing.trace import Trace, check_trace, read_trace

SUREST = 1 - 1e-6
"""An expert that every token chose is drawn as one that nearly every token does."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """What files say of routing: of ``routing.path`` and of ``experts.load``."""

    routing: Trace | LoadTable | None = None
    load: Trace | LoadTable | None = None

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.routing is not None or self.load is not None


NOTHING = Recorded()
"""For configs that name no file."""


def read_recorded(config: Config, near: str | Path | None = None) -> Recorded:
    """Read the files a config names, beside ``near`` (the config's path) or from here."""
    routing, load = config.routing.path, config.experts.load
    found: Trace | LoadTable | None = None
    if routing is not None:
        path = find_beside(routing, near, "routing.path")
        found = read_trace(path) if config.routing.kind == "trace" else read_load_table(path)
    return Recorded(
        routing=found,
        load=None if load is None else read_load(find_beside(load, near, "experts.load")),
    )


def read_load(path: Path) -> Trace | LoadTable:
    """A trace or a load table, by the file's suffix."""
    if path.suffix in routing_trace.SUFFIXES:
        return read_trace(path)
    if path.suffix in routing_table.SUFFIXES:
        return read_load_table(path)
    accepted = ", ".join((*routing_trace.SUFFIXES, *routing_table.SUFFIXES))
    raise ConfigError(f"{path}: got {path.suffix or 'no suffix'}; accepted: {accepted}")


def recorded_load(
    recorded: Trace | LoadTable, layers: tuple[LoopLayer, ...], model: ModelShape
) -> list[Counts]:
    """Each loop layer's recorded counts, [num_experts]."""
    rows = recorded_rows(recorded.num_rows, layers, model, recorded.source)
    if isinstance(recorded, LoadTable):
        return [recorded.row(row, model.num_experts) for row in rows]
    check_trace(recorded, model.top_k, model.num_experts)
    counts = recorded.counts(model.num_experts)
    return [counts[row] for row in rows]


def expected_load(
    config: Config,
    model: ModelShape,
    layers: tuple[LoopLayer, ...],
    world_size: int,
    recorded: Recorded,
) -> list[Counts]:
    """Each loop layer's expected load, [num_experts]: of ``experts.load``, or of the routing kind.

    The gate's own choice is not known before it runs and counts as even.
    """
    source = recorded.load or recorded.routing
    if source is not None:
        return recorded_load(source, layers, model)
    return [_of_kind(config.routing, model, layer, world_size) for layer in layers]


def _of_kind(
    routing: RoutingConfig, model: ModelShape, layer: LoopLayer, world_size: int
) -> Counts:
    experts, top_k = model.num_experts, model.top_k
    if routing.kind in ("zipf", "lognormal"):
        return inclusion(likelihood(routing, experts, layer), top_k)
    load = np.ones(experts)
    block = first_block(experts, world_size)
    if routing.kind == "stress":
        load[:] = 0
        load[: min(block, top_k)] = 1
    elif routing.kind == "hot_rank":
        hot = min(routing.share * top_k, block)
        load[:block] = hot / block
        load[block:] = (top_k - hot) / max(1, experts - block)
    elif routing.kind == "hot_expert":
        load[0] = routing.share
        load[1:] = (top_k - routing.share) / max(1, experts - 1)
    return load


def first_block(num_experts: int, world_size: int) -> int:
    """Experts 0 to this one are rank 0's where placement is contiguous."""
    return max(1, num_experts // world_size)


def likelihood(routing: RoutingConfig, num_experts: int, layer: LoopLayer) -> Counts:
    """[num_experts] weights of zipf and lognormal; which expert is hot depends on the layer."""
    names = repr((routing.kind, routing.seed, layer.ordinal))
    seed = int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "big")
    rng = np.random.default_rng(seed)
    if routing.kind == "lognormal":
        return np.exp(routing.sigma * rng.standard_normal(num_experts))
    ranks = rng.permutation(num_experts) + 1
    return np.asarray(ranks**-routing.alpha, dtype=np.float64)


def inclusion(weights: Counts, top_k: int) -> Counts:
    """How often each expert is among ``top_k`` drawn one after the other by weight.

    1 - exp(-t * weight), with t so that they add up to top_k: the limit for many experts (Rosen,
    "Asymptotic theory for successive sampling", 1972).
    """
    if top_k >= len(weights):
        return np.ones(len(weights))
    low, high = 0.0, 1.0
    while -np.expm1(-high * weights).sum() < top_k and high < 1e300:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if -np.expm1(-middle * weights).sum() < top_k:
            low = middle
        else:
            high = middle
    return np.asarray(-np.expm1(-high * weights))


def weights_for(counts: Counts, top_k: int, source: str) -> Counts:
    """Weights by which draws of ``top_k`` reproduce recorded counts: inclusion, the other way."""
    if int((counts > 0).sum()) < top_k:
        raise ConfigError(f"{source}: fewer than top_k = {top_k} experts of a layer got a token")
    share = np.minimum(counts * (top_k / counts.sum()), SUREST)
    return np.asarray(-np.log1p(-share))
