"""Transports move rows to their experts and back. One file each; add a member by listing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from epdecode.batch import Batch, Pending, Route
from epdecode.plan import Plan
from epdecode.registry import load_member
from epdecode.world import World


class Transport(Protocol):
    """Permutation, padding, wire format and router weights are the transport's business, once."""

    def dispatch(self, x: torch.Tensor, route: Route, apart: bool = True) -> Pending[Batch]:
        """Send x (bfloat16 [T, H]) to the experts of ``route``; rows arrive grouped by expert.

        apart: something is done or timed between the send and its receive. Where nothing is, both
        may be one launch, and ``wait`` adds nothing.
        """
        ...

    def combine(
        self, rows: torch.Tensor, batch: Batch, route: Route, apart: bool = True
    ) -> Pending[torch.Tensor]:
        """Take expert outputs from where they arrived; bfloat16 [T, H], weighted and summed.

        apart: as in dispatch.
        """
        ...

    def rehearse(self, tokens: int, experts: Callable[[Batch], torch.Tensor]) -> None:
        """Do on made-up rows of ``tokens`` tokens a rank, evenly spread, what a step does besides
        sending: whatever compiles at its first use is compiled after it. No peer takes part."""
        ...

    def close(self) -> None:
        """Release buffers. Collective; before the group is left."""
        ...


MEMBERS = {
    "torch_a2a": "epdecode.transport.torch_a2a:TorchAllToAll",
    "deepep_ll": "epdecode.transport.deepep_ll:DeepEPLowLatency",
}
"""Those that deliver a MaskedBatch."""

PACKED_MEMBERS = {
    "torch_a2a": "epdecode.transport.torch_a2a_packed:TorchAllToAllPacked",
    "deepep_ht": "epdecode.transport.deepep_ht:DeepEPHighThroughput",
}
"""Those that deliver a PackedBatch."""

_BY_LAYOUT = {"masked": MEMBERS, "packed": PACKED_MEMBERS}


def load_transport(plan: Plan) -> Any:
    """The class the plan names; raises EnvironmentFault when its library cannot be loaded."""
    return load_member("transport", _BY_LAYOUT[plan.transport.layout], plan.transport.name)


def build_transport(plan: Plan, world: World) -> Transport:
    """The transport the plan names."""
    member: Transport = load_transport(plan)(plan, world)
    return member
