"""A run's own routes as a trace, in the order in which ``routing: {kind: trace}`` reads it back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from epdecode.build import Runtime
from epdecode.graphs import Step, fill
from epdecode.inputs import Planned
from epdecode.routing.trace import write_trace

TRACE = "routing.safetensors"
"""Its name in a run's folder."""


def record_routes(runtime: Runtime, step: Step, batches: Sequence[Planned], path: Path) -> None:
    """Run every distinct batch once more and write where its tokens went. Collective.

    Logical ids, [tokens, layers, top_k]: batches in order, within one rank after rank. Rank 0
    writes; the order and the token counts stand in the file's metadata.
    """
    world, plan = runtime.world, runtime.plan
    steps = []
    for planned in batches:
        fill(step.inputs, planned.batch, planned.bucket)
        output = step(planned.bucket)
        runtime.clock.synchronize()
        ids = torch.stack([trace.route.topk_ids for trace in output.traces], dim=1).cpu()
        ranks = world.gather(ids.contiguous())
        steps += [part[:count] for part, count in zip(ranks, planned.counts, strict=True)]
    if world.rank == 0:
        facts = {
            "model": plan.model.name,
            "num_experts": str(plan.model.num_experts),
            "layers": json.dumps([layer.number for layer in plan.loop_layers]),
            "tokens_per_rank_and_step": json.dumps([planned.counts for planned in batches]),
        }
        write_trace(path, np.concatenate([part.numpy() for part in steps]), facts)
