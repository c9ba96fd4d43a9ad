"""The packed all-to-all over gloo in plain torch: the CPU twin and the oracle of deepep_ht.

A token goes once to each rank that holds one of its experts, with its ids there and its weights;
the weighted sum over that rank's experts comes back in bfloat16 and is summed over ranks in rank
order, so a result never depends on arrival order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from epdecode.batch import Batch, Fp8Rows, Pending, Route, Rows
from epdecode.plan import Plan
from epdecode.transport.checks import check_dispatch
from epdecode.transport.exchange import exchange_counts, exchange_rows
from epdecode.transport.packing import Arrival, Packer, Received
from epdecode.world import World


@dataclass(frozen=True, slots=True)
class _Back:
    """tokens: int64 [n], token of each sent row; sent, received: rows to and from each rank."""

    tokens: torch.Tensor
    sent: list[int]
    received: list[int]


class TorchAllToAllPacked:
    """Packed batches through all_to_all_single."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan = plan
        self._world = world
        self._packer = Packer(plan, world.device)
        self._pad = self._worst_case if plan.transport.worst_case_rows else _as_it_is

    def dispatch(self, x: torch.Tensor, route: Route, apart: bool = True) -> Pending[Batch]:
        """See Transport.dispatch; everything happens here, ``wait`` only hands over."""
        check_dispatch(x, route, self._plan)
        target, token = self._who_goes_where(route.topk_ids)
        leaving = torch.bincount(target, minlength=self._world.size)
        sent = leaving.tolist()
        received = exchange_counts(leaving, self._world).flatten().tolist()
        ids, weights = self._for_target(route, target, token)
        wire = self._packer.to_wire(x)

        def move(rows: torch.Tensor) -> torch.Tensor:
            return exchange_rows(rows, sent, received, self._world)

        arrived = self._pad(
            Received(_each(wire, lambda part: move(part[token])), move(ids), move(weights))
        )
        batch = self._packer.pack(arrived, x.shape[0], _Back(token, sent, received))
        return Pending(lambda: batch)

    def combine(
        self, rows: torch.Tensor, batch: Batch, route: Route, apart: bool = True
    ) -> Pending[torch.Tensor]:
        """See Transport.combine: a plain sum over ranks in float32, rounded once."""
        arrival: Arrival = batch.handle
        back: _Back = arrival.back
        sums = self._packer.unpack(rows, arrival)[: sum(back.received)]
        home = exchange_rows(sums, back.received, back.sent, self._world)
        shape = (route.topk_ids.shape[0], rows.shape[1])
        total = torch.zeros(shape, dtype=torch.float32, device=rows.device)
        per_rank = (torch.split(back.tokens, back.sent), torch.split(home, back.sent))
        for tokens, part in zip(*per_rank, strict=True):
            total[tokens] += part.float()
        combined = total.to(torch.bfloat16)
        return Pending(lambda: combined)

    def rehearse(self, tokens: int, experts: Callable[[Batch], torch.Tensor]) -> None:
        """See Transport."""
        self._packer.rehearse(tokens, experts)

    def close(self) -> None:
        """Nothing is held outside the process group."""

    def _who_goes_where(self, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(target rank, token) of each row to send, by rank, then by token."""
        owner = torch.where(topk_ids >= 0, topk_ids // self._plan.num_local_experts, -1)
        ranks = torch.arange(self._world.size, device=topk_ids.device)
        needed = (owner[None, :, :] == ranks[:, None, None]).any(2)
        target, token = needed.nonzero(as_tuple=True)
        return target, token

    def _for_target(
        self, route: Route, target: torch.Tensor, token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids as the target numbers them, -1 for experts of others; weights of its own alone."""
        ids = route.topk_ids[token] - target[:, None] * self._plan.num_local_experts
        here = (ids >= 0) & (ids < self._plan.num_local_experts)
        return torch.where(here, ids, -1), torch.where(here, route.topk_weights[token], 0.0)

    def _worst_case(self, received: Received) -> Received:
        """As many rows as could arrive; the tail holds anything and has no expert."""
        most, rows = self._plan.transport.received_rows, received.topk_ids.shape[0]

        def tail(part: torch.Tensor) -> torch.Tensor:
            padded = torch.empty(most, part.shape[1], dtype=part.dtype, device=part.device)
            padded[:rows] = part
            return padded

        ids = tail(received.topk_ids)
        ids[rows:] = -1
        return Received(_each(received.rows, tail), ids, tail(received.weights))


def _as_it_is(received: Received) -> Received:
    return received


def _each(rows: Rows, change: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
    """The same change to data and scales."""
    if isinstance(rows, Fp8Rows):
        return Fp8Rows(change(rows.data), change(rows.scales))
    return change(rows)
