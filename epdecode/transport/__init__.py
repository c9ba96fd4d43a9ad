"""Transports move rows to their experts and back. One file each; add a member by listing it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from epdecode.batch import Batch, Pending, Route
from epdecode.plan import Plan
from epdecode.registry import load_member
from epdecode.world import World


class Transport(Protocol):
    """Permutation, padding, wire format and router weights are the transport's business, once."""

    def dispatch(self, x: torch.Tensor, route: Route) -> Pending[Batch]:
        """Send x (bfloat16 [T, H]) to the experts of ``route``; rows arrive grouped by expert."""
        ...

    def combine(self, rows: torch.Tensor, batch: Batch, route: Route) -> Pending[torch.Tensor]:
        """Take expert outputs from where they arrived; bfloat16 [T, H], weighted and summed."""
        ...

    def close(self) -> None:
        """Release buffers. Collective; before the group is left."""
        ...


MEMBERS = {
    "torch_a2a": "epdecode.transport.torch_a2a:TorchAllToAll",
    "deepep_ll": "epdecode.transport.deepep_ll:DeepEPLowLatency",
}


def build_transport(plan: Plan, world: World, **extra: Any) -> Transport:
    """The transport the plan names."""
    member: Transport = load_member("transport", MEMBERS, plan.transport.name)(plan, world, **extra)
    return member
