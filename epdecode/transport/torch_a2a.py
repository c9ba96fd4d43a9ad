"""All-to-all over gloo in plain torch: the CPU default and the oracle of the others.

Rows are placed by source rank and summed by slot, so a result never depends on arrival order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from epdecode.batch import Batch, Fp8Rows, MaskedBatch, Pending, Route, Rows
from epdecode.kernels.fp8 import GROUP, quantize_ref
from epdecode.plan import Plan
from epdecode.transport.checks import check_dispatch
from epdecode.transport.exchange import exchange_counts, exchange_rows
from epdecode.transport.rehearsal import expected_rows, masked_batch
from epdecode.world import World


@dataclass(frozen=True, slots=True)
class _Journey:
    """How rows went, so that they can come back.

    slots: int64 [n], flat (token, slot) index of each sent row, in sending order.
    places: int64 [m], flat (expert, row) index where each received row was put.
    sent, received: rows to and from each rank.
    """

    slots: torch.Tensor
    places: torch.Tensor
    sent: list[int]
    received: list[int]


class TorchAllToAll:
    """Masked batches through all_to_all_single."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan = plan
        self._world = world
        shape = (plan.num_local_experts, plan.capacity, plan.model.hidden)
        self._rows = _empty_rows(shape, plan.transport.wire, world.device)

    def dispatch(self, x: torch.Tensor, route: Route, apart: bool = True) -> Pending[Batch]:
        """See Transport.dispatch; everything happens here, ``wait`` only hands over."""
        check_dispatch(x, route, self._plan)
        experts = route.topk_ids.flatten()
        slots = torch.nonzero(experts >= 0).flatten()
        slots = slots[torch.argsort(experts[slots], stable=True)]
        per_expert = torch.bincount(experts[slots], minlength=self._plan.num_experts)
        arriving = exchange_counts(per_expert, self._world)
        sent = per_expert.view(self._world.size, -1).sum(1).tolist()
        received = arriving.sum(1).tolist()
        places = _places(arriving, self._plan.capacity)
        wire = quantize_ref(x) if self._plan.transport.wire == "fp8" else x.to(torch.bfloat16)
        self._move(wire, slots // self._plan.model.top_k, places, sent, received)
        counts = arriving.sum(0).to(torch.int32)
        batch = MaskedBatch(
            rows=self._rows,
            counts=counts.to(x.device),
            expected_rows=expected_rows(self._plan, x.shape[0]),
            handle=_Journey(slots, places, sent, received),
        )
        return Pending(lambda: batch)

    def combine(
        self, rows: torch.Tensor, batch: Batch, route: Route, apart: bool = True
    ) -> Pending[torch.Tensor]:
        """See Transport.combine: float32 sum over slots in order, rounded once."""
        journey: _Journey = batch.handle
        there = rows.reshape(-1, rows.shape[-1])[journey.places.to(rows.device)]
        home = exchange_rows(there, journey.received, journey.sent, self._world)
        tokens, top_k = route.topk_ids.shape
        slots = torch.zeros(tokens * top_k, rows.shape[-1], dtype=torch.float32, device=rows.device)
        index = journey.slots.to(rows.device)
        weights = route.topk_weights.flatten()[index]
        slots[index] = home.float() * weights[:, None]
        total = torch.zeros(tokens, rows.shape[-1], dtype=torch.float32, device=rows.device)
        for slot in range(top_k):
            total += slots.view(tokens, top_k, rows.shape[-1])[:, slot]
        combined = total.to(torch.bfloat16)
        return Pending(lambda: combined)

    def rehearse(self, tokens: int, experts: Callable[[Batch], torch.Tensor]) -> None:
        """See Transport."""
        experts(masked_batch(self._plan, self._world.device, tokens))

    def close(self) -> None:
        """Nothing is held outside the process group."""

    def _move(
        self,
        wire: Rows,
        tokens: torch.Tensor,
        places: torch.Tensor,
        sent: list[int],
        received: list[int],
    ) -> None:
        for source, target in zip(_parts(wire), _parts(self._rows), strict=True):
            arrived = exchange_rows(source[tokens], sent, received, self._world)
            flat = target.view(-1, target.shape[-1])
            flat[places.to(target.device)] = arrived


def _places(arriving: torch.Tensor, capacity: int) -> torch.Tensor:
    """Flat (expert, row) places of rows that arrive by source rank, then by expert."""
    before = arriving.cumsum(0) - arriving
    starts = before + torch.arange(arriving.shape[1]) * capacity
    counts = arriving.flatten()
    offsets = torch.arange(int(counts.sum())) - torch.repeat_interleave(
        counts.cumsum(0) - counts, counts
    )
    return torch.repeat_interleave(starts.flatten(), counts) + offsets


def _empty_rows(shape: tuple[int, int, int], wire: str, device: torch.device) -> Rows:
    if wire == "bf16":
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    scales = (*shape[:2], shape[2] // GROUP)
    return Fp8Rows(
        data=torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        scales=torch.empty(scales, dtype=torch.float32, device=device),
    )


def _parts(rows: Rows) -> tuple[torch.Tensor, ...]:
    return (rows.data, rows.scales) if isinstance(rows, Fp8Rows) else (rows,)
