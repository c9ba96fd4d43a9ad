"""Where NaN and infinite values first appear: counted per stage, when the config asks for it.

Wrappers put around the members while building count rows that hold such a value: what the router
sees and says, what arrives, what the experts make of it, what comes back. Only real rows count.
Counters stay on the device and in a captured graph; ``look`` reads them between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epdecode.batch import Batch, Fp8Rows, Mark, MaskedBatch, Pending, Route, Rows
from epdecode.experts import Experts
from epdecode.result import NonFinite
from epdecode.router import Router
from epdecode.transport import Transport
from epdecode.world import World

STAGES = ("route", "dispatch_wait", "down_gemm", "combine_wait")
"""Where rows are looked at, in the order of a layer."""
NEVER = -1


class Tally:
    """Rows with a non-finite value on this rank, by stage, and where the first was seen."""

    def __init__(self, num_local_experts: int, device: torch.device) -> None:
        self._rows = torch.zeros(len(STAGES), dtype=torch.int64, device=device)
        self._experts = torch.zeros(num_local_experts, dtype=torch.int64, device=device)
        self._first = (NEVER, NEVER, NEVER)

    def around(self, transport: Transport, experts: Experts) -> tuple[Transport, Experts]:
        """The same members, counting."""
        return _CountingTransport(transport, self), _CountingExperts(experts, self)

    def around_router(self, router: Router) -> Router:
        """The same router, counting."""
        return _CountingRouter(router, self)

    def reset(self) -> None:
        """Forget the warm-up."""
        self._rows.zero_()
        self._experts.zero_()
        self._first = (NEVER, NEVER, NEVER)

    def look(self, step: int) -> None:
        """After ``step``: remember it when it is the first with a non-finite value."""
        if self._first[0] != NEVER or not bool(self._rows.any()):
            return
        stage = int(self._rows.nonzero()[0])
        bad = self._experts.nonzero().flatten()
        self._first = (step, stage, int(bad[0]) if bad.numel() else NEVER)

    def gather(self, world: World, num_local_experts: int) -> NonFinite:
        """All ranks' counts together, and the first of them by step, then stage. Collective."""
        mine = torch.cat([torch.tensor(self._first), self._rows.cpu()])
        ranks = torch.stack(world.gather(mine))
        counts = dict(zip(STAGES, ranks[:, 3:].sum(0).tolist(), strict=True))
        seen = [rank for rank in range(world.size) if int(ranks[rank, 0]) != NEVER]
        if not seen:
            return NonFinite(counts=counts)
        first = min(seen, key=lambda rank: tuple(ranks[rank, :2].tolist()))
        step, stage, expert = ranks[first, :3].tolist()
        return NonFinite(
            counts=counts,
            first_rank=first,
            first_step=step,
            first_stage=STAGES[stage],
            first_expert=None if expert == NEVER else first * num_local_experts + expert,
        )

    def add(self, stage: str, bad: torch.Tensor) -> None:
        """bad: bool, any shape; its true values are counted."""
        self._rows[STAGES.index(stage)] += bad.sum()

    def add_experts(self, batch: Batch, bad: torch.Tensor) -> None:
        """bad: bool per row of the batch; also counted per local expert."""
        self.add("down_gemm", bad)
        if isinstance(batch, MaskedBatch):
            self._experts += bad.sum(1)
        else:
            owner = batch.labels.clamp(min=0).long()
            self._experts.scatter_add_(0, owner, bad.long())


class _CountingRouter:
    """A row with NaN is counted here: the gate then sends it nowhere."""

    def __init__(self, router: Router, tally: Tally) -> None:
        self._router = router
        self._tally = tally

    def __call__(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> Route:
        """See Router."""
        route = self._router(normed, num_tokens)
        real = torch.arange(normed.shape[0], device=normed.device) < num_tokens
        weights = torch.where(route.topk_ids >= 0, route.topk_weights, 0.0)
        self._tally.add("route", real & (_bad_rows(normed) | _bad_rows(weights)))
        return route

    def plain(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> Route:
        """See Router."""
        return self._router.plain(normed, num_tokens)


class _CountingTransport:
    def __init__(self, transport: Transport, tally: Tally) -> None:
        self._transport = transport
        self._tally = tally

    def dispatch(self, x: torch.Tensor, route: Route, apart: bool = True) -> Pending[Batch]:
        """See Transport."""
        sending = self._transport.dispatch(x, route, apart)

        def finish() -> Batch:
            batch = sending.wait()
            self._tally.add("dispatch_wait", _valid(batch) & _bad_rows(batch.rows))
            return batch

        return Pending(finish)

    def combine(
        self, rows: torch.Tensor, batch: Batch, route: Route, apart: bool = True
    ) -> Pending[torch.Tensor]:
        """See Transport."""
        returning = self._transport.combine(rows, batch, route, apart)

        def finish() -> torch.Tensor:
            combined = returning.wait()
            sent = (route.topk_ids >= 0).any(1)
            self._tally.add("combine_wait", sent & _bad_rows(combined))
            return combined

        return Pending(finish)

    def rehearse(self, tokens: int, experts: Callable[[Batch], torch.Tensor]) -> None:
        """See Transport."""
        self._transport.rehearse(tokens, experts)

    def close(self) -> None:
        """See Transport."""
        self._transport.close()


class _CountingExperts:
    def __init__(self, experts: Experts, tally: Tally) -> None:
        self._experts = experts
        self._tally = tally

    def prepare(self, weights: Any) -> Any:
        """See Experts."""
        return self._experts.prepare(weights)

    def __call__(self, batch: Batch, weights: Any, mark: Mark) -> torch.Tensor:
        """See Experts."""
        rows = self._experts(batch, weights, mark)
        self._tally.add_experts(batch, _valid(batch) & _bad_rows(rows))
        return rows


def _valid(batch: Batch) -> torch.Tensor:
    """bool [E, M] or [R]: rows that somebody sent."""
    if not isinstance(batch, MaskedBatch):
        return batch.labels >= 0
    capacity = (batch.rows.data if isinstance(batch.rows, Fp8Rows) else batch.rows).shape[1]
    rows = torch.arange(capacity, device=batch.counts.device)
    return rows < batch.counts[:, None]


def _bad_rows(rows: Rows) -> torch.Tensor:
    """bool [...]: rows with a value that is not finite, in data or in float32 scales."""
    if not isinstance(rows, Fp8Rows):
        return ~torch.isfinite(rows).all(-1)
    # e4m3 has no infinity; NaN is 0x7F and 0xFF.
    bad = ((rows.data.view(torch.uint8) & 0x7F) == 0x7F).any(-1)
    if rows.scales.dtype == torch.float32:
        bad |= ~torch.isfinite(rows.scales).all(-1)
    return bad
