"""Everything that compiles, compiled before the first exchange.

Kernels compile at first use, at a different speed on every rank, and a transport that waits for a
peer has a time limit: so no transport call happens before every rank has been through here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch

from epdecode.batch import Fp8Rows, MaskedBatch, no_mark
from epdecode.build import Runtime
from epdecode.graphs import Step, fill
from epdecode.inputs import Planned
from epdecode.kernels.fp8 import mn_major_scales, num_groups

log = logging.getLogger(__name__)


def compile_all(runtime: Runtime) -> None:
    """Run norm, router, experts and shared expert on local rows, for every bucket."""
    plan = runtime.plan
    rows = _local_rows(runtime)
    counts = torch.ones(plan.num_local_experts, dtype=torch.int32, device=runtime.world.device)
    for bucket in plan.buckets:
        selections = bucket * plan.model.top_k * plan.world_size
        expected = max(1, -(-selections // plan.num_experts))
        hidden = runtime.inputs.hidden[:bucket]
        for layer in runtime.layers:
            normed = layer.norm(hidden)
            layer.router(normed, runtime.inputs.num_tokens)
            layer.shared.start(normed, runtime.inputs.num_tokens)
            layer.shared.add_to(normed)
            layer.experts(MaskedBatch(rows, counts, expected), layer.weights, no_mark)
    runtime.clock.synchronize()
    log.info("compiled for buckets %s", ", ".join(map(str, plan.buckets)))


def _local_rows(runtime: Runtime) -> torch.Tensor | Fp8Rows:
    """A received block of random rows, in the shape and strides that the transport delivers."""
    plan, device = runtime.plan, runtime.world.device
    shape = (plan.num_local_experts, plan.capacity, plan.model.hidden)
    if plan.transport.wire == "bf16":
        return torch.randn(shape[0], 1, shape[2], dtype=torch.bfloat16, device=device).repeat(
            1, shape[1], 1
        )
    groups = num_groups(plan.model.hidden, "hidden")
    values = torch.randn(shape[0], 1, shape[2], device=device).to(torch.float8_e4m3fn)
    return Fp8Rows(
        values.view(torch.uint8).repeat(1, shape[1], 1).view(torch.float8_e4m3fn),
        mn_major_scales(*shape[:2], groups, plan.experts.scale_format, device),
    )


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
