"""Everything that compiles, compiled before the first exchange.

Kernels compile at first use, at a different speed on every rank, and a transport that waits for a
peer has a time limit: so no transport call happens before every rank has been through here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch

from epdecode.batch import Batch, no_mark
from epdecode.build import Runtime
from epdecode.graphs import Step, fill
from epdecode.inputs import Planned

log = logging.getLogger(__name__)


def compile_all(runtime: Runtime) -> None:
    """Run everything but the exchange itself on local rows, for every bucket."""
    plan, layers = runtime.plan, runtime.layers

    def experts(batch: Batch) -> torch.Tensor:
        return [layer.experts(batch, layer.weights, no_mark) for layer in layers][-1]

    for bucket in plan.buckets:
        hidden = runtime.inputs.hidden[:bucket]
        for layer in layers:
            normed = layer.norm(hidden)
            layer.router(normed, runtime.inputs.num_tokens)
            layer.shared.start(normed, runtime.inputs.num_tokens)
            layer.end(hidden, normed, layer.shared.join())
        runtime.transport.rehearse(bucket, experts)
    runtime.clock.synchronize()
    log.info("compiled for buckets %s", ", ".join(map(str, plan.buckets)))


def warm_up(runtime: Runtime, step: Step, batches: Sequence[Planned], steps: int) -> float:
    """Run ``steps`` untimed steps; microseconds of the first one (0 without any)."""
    first = 0.0
    for index in range(steps):
        planned = batches[index % len(batches)]
        fill(step.inputs, planned.batch, planned.bucket)
        took = runtime.clock.time(partial(step, planned.bucket))()
        first = first or took
    runtime.clock.synchronize()
    return first
