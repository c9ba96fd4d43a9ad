"""What a config names outside itself: a checkpoint, recorded routes. Opened and checked once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from epdecode.config import Config
from epdecode.config.load import find_checkpoint
from epdecode.inputs import tokens_needed
from epdecode.models import ModelShape
from epdecode.plan import Plan
from epdecode.routing.load import NOTHING, Recorded
from epdecode.routing.trace import Trace, check_trace, need_tokens
from epdecode.weights.checkpoint import Checkpoint, check_layers


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """checkpoint: what the weights are read from, None = seeded; recorded: routes and loads."""

    checkpoint: Checkpoint | None = None
    recorded: Recorded = NOTHING

    @property
    def digest(self) -> str:
        """Of the recordings: equal on all ranks, or they would not route alike."""
        parts = [one.digest() for one in (self.recorded.routing, self.recorded.load) if one]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16] if parts else "none"


NO_SOURCES = Sources()
"""Seeded weights, and routes that need no file."""


def open_sources(
    config: Config,
    model: ModelShape,
    plan: Plan,
    recorded: Recorded,
    near: str | Path | None = None,
) -> Sources:
    """Open what the config names and hold it against the plan, before anything is allocated.

    model: as it was read, without padding; near: the config's path. Raises ConfigError.
    """
    if isinstance(recorded.routing, Trace):
        if recorded.load is not None:
            # Otherwise the plan has looked through it, for the load it gives.
            check_trace(recorded.routing, plan.model.top_k, plan.model.num_experts)
        needed = tokens_needed(config, plan.world_size)
        need_tokens(recorded.routing, needed, config.routing.wrap)
    if config.weights.source == "seeded":
        return Sources(recorded=recorded)
    checkpoint = Checkpoint(find_checkpoint(config, near))
    check_layers(checkpoint, model, [layer.number for layer in plan.loop_layers])
    return Sources(checkpoint, recorded)
