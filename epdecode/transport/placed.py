"""Logical experts outside, physical ones on the wire: a layer's placement around a transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from epdecode.batch import Batch, Pending, Route
from epdecode.plan import Plan
from epdecode.plan.placement import replica_table
from epdecode.transport import Transport
from epdecode.transport.checks import check_dispatch
from epdecode.world import World


@dataclass(frozen=True, slots=True)
class _Placed:
    """What combine needs of a dispatch: the route as it was sent, and its own handle."""

    route: Route
    handle: Any


class PlacedTransport:
    """Sends each (token, logical expert) to one slot that holds the expert.

    table: int64 [max_tokens, num_experts + 1], the slot of each token row and expert; id -1 reads
    the last column, -1. One gather a dispatch; the transport itself is shared by all layers.
    """

    def __init__(self, transport: Transport, plan: Plan, table: torch.Tensor) -> None:
        self._transport = transport
        self._plan = plan
        self._table = table
        self._rows = torch.arange(table.shape[0], device=table.device)[:, None]

    def dispatch(self, x: torch.Tensor, route: Route, apart: bool = True) -> Pending[Batch]:
        """See Transport."""
        check_dispatch(x, route, self._plan)
        slots = self._table[self._rows[: x.shape[0]], route.topk_ids]
        sent = replace(route, topk_ids=slots)
        sending = self._transport.dispatch(x, sent, apart)

        def finish() -> Batch:
            batch = sending.wait()
            return replace(batch, handle=_Placed(sent, batch.handle))

        return Pending(finish)

    def combine(
        self, rows: torch.Tensor, batch: Batch, route: Route, apart: bool = True
    ) -> Pending[torch.Tensor]:
        """See Transport."""
        placed: _Placed = batch.handle
        own = replace(batch, handle=placed.handle)
        return self._transport.combine(rows, own, placed.route, apart)

    def rehearse(self, tokens: int, experts: Callable[[Batch], torch.Tensor]) -> None:
        """See Transport."""
        self._transport.rehearse(tokens, experts)

    def close(self) -> None:
        """See Transport."""
        self._transport.close()


def place(transport: Transport, plan: Plan, world: World, layer: int) -> Transport:
    """The transport of one layer of the loop: as it is where placement is contiguous."""
    if not plan.placement.slots:
        return transport
    slots = plan.placement.slots[layer]
    table = replica_table(slots, plan.model.num_experts, plan.max_tokens, world.rank)
    return PlacedTransport(
        transport, plan, torch.tensor(table, dtype=torch.int64, device=world.device)
    )
