"""All-to-all over gloo, as bytes: gloo knows neither bfloat16 nor FP8, and bits must survive."""

from __future__ import annotations

import torch
import torch.distributed as dist

from epdecode.world import World


def exchange_counts(per_target: torch.Tensor, world: World) -> torch.Tensor:
    """int64 [ranks, n]: row r of the answer is what rank r had for this one in its own table."""
    outgoing = per_target.cpu().view(world.size, -1)
    arriving = torch.empty_like(outgoing)
    dist.all_to_all_single(arriving, outgoing, group=world.group)
    return arriving


def exchange_rows(
    rows: torch.Tensor, sent: list[int], received: list[int], world: World
) -> torch.Tensor:
    """rows [sum(sent), n] of any dtype, by target rank -> [sum(received), n] by source rank."""
    data = rows.contiguous().view(torch.uint8).cpu()
    out = torch.empty(sum(received), data.shape[1], dtype=torch.uint8)
    dist.all_to_all_single(out, data, received, sent, group=world.group)
    return out.view(rows.dtype).to(rows.device)
