"""Made-up rows for a rehearsal: what arrives when every expert gets the same."""

from __future__ import annotations

import torch

from epdecode.batch import Fp8Rows, MaskedBatch, Rows
from epdecode.kernels.fp8 import mn_major_scales, num_groups
from epdecode.plan import Plan


def expected_rows(plan: Plan, tokens: int) -> int:
    """Mean rows of an expert when every rank has ``tokens`` tokens; at least 1."""
    selections = tokens * plan.model.top_k * plan.world_size
    return max(1, -(-selections // plan.num_experts))


def masked_batch(plan: Plan, device: torch.device, tokens: int) -> MaskedBatch:
    """A received block of random rows, in the shape and strides of the real ones."""
    counts = torch.ones(plan.num_local_experts, dtype=torch.int32, device=device)
    return MaskedBatch(_block(plan, device), counts, expected_rows(plan, tokens))


def _block(plan: Plan, device: torch.device) -> Rows:
    local, capacity, hidden = plan.num_local_experts, plan.capacity, plan.model.hidden
    values = torch.randn(local, 1, hidden, dtype=torch.bfloat16, device=device)
    if plan.transport.wire == "bf16":
        return values.repeat(1, capacity, 1)
    groups = num_groups(hidden, "hidden")
    data = values.to(torch.float8_e4m3fn).view(torch.uint8).repeat(1, capacity, 1)
    return Fp8Rows(
        data.view(torch.float8_e4m3fn),
        mn_major_scales(local, capacity, groups, plan.experts.scale_format, device),
    )
