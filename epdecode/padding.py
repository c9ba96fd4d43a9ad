"""What alignment and the worst case cost: packed rows that hold no token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epdecode.plan import Plan
from epdecode.result import PackedRows
from epdecode.world import World


def packed_rows_use(plan: Plan, world: World, load: Sequence[torch.Tensor]) -> PackedRows | None:
    """Means over layers and steps on the rank with the most rows; None for masked rows. Collective.

    load: int32 [E] each, rows that every local expert of this rank received.
    """
    if plan.transport.layout == "masked":
        return None
    everyone = torch.stack(world.gather(torch.stack(list(load)).double()))
    alignment = plan.transport.row_alignment
    rows = everyone.sum(2).mean(1)
    aligned = (torch.ceil(everyone / alignment) * alignment).sum(2).mean(1)
    busiest = int(rows.argmax())
    return PackedRows(
        rows=float(rows[busiest]),
        aligned_rows=float(aligned[busiest]),
        planned_rows=plan.transport.packed_rows,
        worst_case=plan.transport.worst_case_rows,
        buffer_bytes=plan.memory["packing"] + sum(plan.experts.workspace_bytes),
    )
