"""The MoE layer: route, dispatch, experts, combine, residual, next norm. Names no backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from epdecode.batch import LayerEnd, Mark, Route, no_mark
from epdecode.experts import Experts
from epdecode.router import Router
from epdecode.shared import SharedExpert
from epdecode.transport import Transport

Norm = Callable[[torch.Tensor], torch.Tensor]
End = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], LayerEnd]
"""end(hidden, routed, shared or None): the sums that close a layer and the norm that follows."""


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

    norm: Norm
    """Of this layer's input. In a step only the first layer calls it: ``end`` of the layer before
    has done it for the others."""
    router: Router
    transport: Transport
    experts: Experts
    weights: Any
    shared: SharedExpert
    end: End

    def __call__(
        self, hidden: torch.Tensor, normed: torch.Tensor, num_tokens: torch.Tensor, mark: Mark
    ) -> tuple[LayerEnd, LayerTrace]:
        """hidden and its norm [T, H] bfloat16, num_tokens (int32 [1]) of them real."""
        route = self.router(normed, num_tokens)
        mark("route")
        routed, shared, counts = self._exchange(normed, route, num_tokens, mark)
        end = self.end(hidden, routed, shared)
        return end, LayerTrace(hidden, normed, route, end.out, counts)

    def apply(
        self, normed: torch.Tensor, route: Route, num_tokens: torch.Tensor, mark: Mark
    ) -> torch.Tensor:
        """Routed and shared experts on rows already normed, by a given route."""
        routed, shared, _ = self._exchange(normed, route, num_tokens, mark)
        return routed if shared is None else routed + shared

    def _exchange(
        self, normed: torch.Tensor, route: Route, num_tokens: torch.Tensor, mark: Mark
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """What the routed experts gave, what the shared one gave, and the counts."""
        apart = self.shared.aside or mark is not no_mark
        sending = self.transport.dispatch(normed, route, apart)
        mark("dispatch_send")
        self.shared.start(normed, num_tokens)
        mark("shared_expert")
        batch = sending.wait()
        mark("dispatch_wait")
        rows = self.experts(batch, self.weights, mark)
        returning = self.transport.combine(rows, batch, route, apart)
        mark("combine_send")
        routed = returning.wait()
        mark("combine_wait")
        shared = self.shared.join()
        mark("shared_expert")
        return routed, shared, batch.counts
