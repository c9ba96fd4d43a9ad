"""The MoE layer: norm, route, dispatch, experts, combine, residual. Names no backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from epdecode.batch import Mark, Route
from epdecode.experts import Experts
from epdecode.router import Router
from epdecode.shared import SharedExpert
from epdecode.transport import Transport


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """What went through a layer: enough to check its numbers without running it again.

    hidden, normed: bfloat16 [T, H] input, before and after its norm; route: where its rows went;
    out: bfloat16 [T, H], what the layer added; counts: int32 [E], rows each local expert received.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    route: Route
    out: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class MoELayer:
    """One layer on one rank, built from members chosen once (build.py)."""

    norm: Callable[[torch.Tensor], torch.Tensor]
    router: Router
    transport: Transport
    experts: Experts
    weights: Any
    shared: SharedExpert

    def __call__(
        self, hidden: torch.Tensor, num_tokens: torch.Tensor, mark: Mark
    ) -> tuple[torch.Tensor, LayerTrace]:
        """hidden [T, H] bfloat16 of which num_tokens (int32 [1]) are real -> next hidden, trace."""
        normed = self.norm(hidden)
        route = self.router(normed, num_tokens)
        mark("route")
        out, counts = self.apply(normed, route, num_tokens, mark)
        return hidden + out, LayerTrace(hidden, normed, route, out, counts)

    def apply(
        self, normed: torch.Tensor, route: Route, num_tokens: torch.Tensor, mark: Mark
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Routed and shared experts on rows already normed, by a given route; also the counts."""
        sending = self.transport.dispatch(normed, route)
        mark("dispatch_send")
        self.shared.start(normed, num_tokens)
        mark("shared_expert")
        batch = sending.wait()
        mark("dispatch_wait")
        rows = self.experts(batch, self.weights, mark)
        returning = self.transport.combine(rows, batch, route)
        mark("combine_send")
        routed = returning.wait()
        mark("combine_wait")
        out = self.shared.add_to(routed)
        mark("shared_expert")
        return out, batch.counts
