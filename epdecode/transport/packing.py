"""Received rows -> PackedBatch, and expert outputs -> one weighted row per received one.

Both packed transports do this between dispatch and combine. Router weights are applied here, once:
what travels back is summed without weights. All buffers are made once, for the worst case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from epdecode.batch import Batch, Fp8Rows, PackedBatch, Rows
from epdecode.kernels.fp8 import mn_major_scales, num_groups
from epdecode.kernels.group_quant import empty_quantized, group_quant, group_quant_ref
from epdecode.kernels.pack import pack, pack_ref, unpack_weighted, unpack_weighted_ref
from epdecode.kernels.place_routes import Places, empty_places, place_routes, place_routes_ref
from epdecode.plan import Plan
from epdecode.transport.rehearsal import expected_rows

Reduce = Callable[[torch.Tensor, Places, torch.Tensor, torch.Tensor], torch.Tensor]
"""(expert rows [R, H], places, weights [R0, K], out [R0, H]) -> out."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What arrived, and the way back.

    places: where each route's row was put. weights: float32 [R0, K], router weights of the routes.
    back: the transport's own.
    """

    places: Places
    weights: torch.Tensor
    back: Any


@dataclass(frozen=True, slots=True)
class Received:
    """rows [R0, H]; topk_ids int64 [R0, K] local expert ids, -1 = not here; weights [R0, K]."""

    rows: Rows
    topk_ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Ops:
    place: Callable[[torch.Tensor, int, Places], Places]
    pack: Callable[[Rows, Places, Rows], Rows]
    reduce: Reduce
    quantise: Callable[..., Fp8Rows]


KERNELS = _Ops(place_routes, pack, unpack_weighted, group_quant)
PLAIN = _Ops(place_routes_ref, pack_ref, unpack_weighted_ref, group_quant_ref)


class Packer:
    """Sorts received rows by expert and sums them back, in buffers that all layers share."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        transport, model = plan.transport, plan.model
        self._plan = plan
        self._device = device
        self._ops = KERNELS if device.type == "cuda" else PLAIN
        self._reduce = self._ops.reduce if transport.fused_reduce else reduce_apart
        received, rows = transport.received_rows, transport.packed_rows
        self._rows = self._packed_rows(rows)
        self._places = empty_places(received, model.top_k, plan.num_local_experts, rows, device)
        self._sums = torch.zeros(received, model.hidden, dtype=torch.bfloat16, device=device)
        self._to_wire = self._wire_format()

    def to_wire(self, x: torch.Tensor) -> Rows:
        """x bfloat16 [T, H] as it is sent: quantised once, however many experts will read it."""
        return self._to_wire(x)

    def pack(self, received: Received, tokens: int, back: Any = None) -> PackedBatch:
        """Copy each received row to each of its local experts; tokens: of a rank, for the hint."""
        places = replace(
            self._places,
            counts=torch.empty_like(self._places.counts),
            row_map=self._places.row_map[: received.topk_ids.shape[0]],
        )
        self._ops.place(received.topk_ids, self._plan.transport.row_alignment, places)
        return PackedBatch(
            rows=self._ops.pack(received.rows, places, self._rows),
            labels=places.labels,
            counts=places.counts,
            expected_rows=expected_rows(self._plan, tokens),
            handle=Arrival(places, received.weights, back),
        )

    def unpack(self, rows: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """Expert outputs [R, H] -> bfloat16 [R0, H]: each received row's weighted sum."""
        out = self._sums[: arrival.weights.shape[0]]
        return self._reduce(rows, arrival.places, arrival.weights, out)

    def rehearse(self, tokens: int, experts: Callable[[Batch], torch.Tensor]) -> None:
        """Every kernel once, on received rows that give each expert the same load."""
        self.to_wire(torch.zeros(tokens, self._plan.model.hidden, **self._bfloat16()))
        exact = not self._plan.transport.worst_case_rows
        most = tokens * self._plan.world_size
        # Triton compiles odd sizes apart; without the worst case any number of rows may arrive.
        for rows in (most, most - 1) if exact else (self._plan.transport.received_rows,):
            batch = self.pack(self._made_up(rows, most), tokens)
            self.unpack(experts(batch), batch.handle)

    def _made_up(self, rows: int, real: int) -> Received:
        top_k = self._plan.model.top_k
        slots = torch.arange(rows * top_k, device=self._device).view(rows, top_k)
        ids = slots % self._plan.num_experts
        here = (ids < self._plan.num_local_experts) & (slots < real * top_k)
        x = torch.zeros(rows, self._plan.model.hidden, **self._bfloat16())
        wire = self._plan.transport.wire
        scales = self._plan.experts.scale_format
        sent: Rows = x if wire == "bf16" else self._ops.quantise(x, scales, "row")
        return Received(
            sent, torch.where(here, ids, -1), torch.zeros(rows, top_k, device=self._device)
        )

    def _bfloat16(self) -> dict[str, Any]:
        return {"dtype": torch.bfloat16, "device": self._device}

    def _packed_rows(self, rows: int) -> Rows:
        hidden = self._plan.model.hidden
        if self._plan.transport.wire == "bf16":
            return torch.empty(rows, hidden, **self._bfloat16())
        groups, scale_format = num_groups(hidden, "hidden"), self._plan.experts.scale_format
        return Fp8Rows(
            torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=self._device),
            mn_major_scales(1, rows, groups, scale_format, self._device)[0],
        )

    def _wire_format(self) -> Callable[[torch.Tensor], Rows]:
        if self._plan.transport.wire == "bf16":
            return _in_bfloat16
        scale_format = self._plan.experts.scale_format
        shape = (self._plan.max_tokens, self._plan.model.hidden)
        most = empty_quantized(torch.empty(shape, **self._bfloat16()), scale_format, "row")

        def quantise(x: torch.Tensor) -> Rows:
            out = Fp8Rows(most.data[: x.shape[0]], most.scales[: x.shape[0]])
            return self._ops.quantise(x.to(torch.bfloat16), scale_format, "row", out)

        return quantise


def _in_bfloat16(x: torch.Tensor) -> Rows:
    return x.to(torch.bfloat16).contiguous()


def reduce_apart(
    rows: torch.Tensor, places: Places, weights: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Gather, multiply, sum in plain torch, through [R0, K, H]: what one kernel replaces."""
    at = places.row_map.long()
    here = at >= 0
    gathered = rows.index_select(0, at.clamp(min=0).flatten()).view(*at.shape, rows.shape[1])
    # Selected, not multiplied by zero: a row or weight of an empty slot may be NaN.
    weighted = torch.where(here[..., None], gathered.float() * weights[..., None], 0.0)
    out.copy_(weighted.sum(1))
    return out
