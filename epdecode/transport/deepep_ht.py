"""DeepEP's high-throughput (normal) all-to-all: a token goes once to each rank that needs it.

Dispatch and combine run on DeepEP's own stream and are waited for by event, so that what is
enqueued in between runs beside them. Without worst-case rows the dispatch makes the host wait for
the number of received rows; with them nothing waits and the step can be captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import deep_ep
import torch

from epdecode.batch import Batch, Fp8Rows, Pending, Route, Rows
from epdecode.errors import ConfigError
from epdecode.plan import Plan
from epdecode.plan.limits_ht import NODE_RANKS, hidden_bytes
from epdecode.transport.checks import check_dispatch
from epdecode.transport.packing import Arrival, Packer, Received
from epdecode.world import World

log = logging.getLogger(__name__)


class DeepEPHighThroughput:
    """Packed batches; router weights are applied here, DeepEP's combine is a plain sum."""

    def __init__(self, plan: Plan, world: World) -> None:
        _check_nodes(world)
        self._plan = plan
        # Read by the recommended configs, which are made here and used in every call.
        deep_ep.Buffer.set_num_sms(plan.transport.num_sms)
        self._dispatch_config = deep_ep.Buffer.get_dispatch_config(world.size)
        self._combine_config = deep_ep.Buffer.get_combine_config(world.size)
        self.nvl_bytes, self.rdma_bytes = self._hints(world.size)
        log.info(
            "deepep_ht buffers: NVLink %d, RDMA %d bytes; planned %d and %d",
            self.nvl_bytes,
            self.rdma_bytes,
            plan.transport.nvl_bytes,
            plan.transport.rdma_bytes,
        )
        self._buffer = deep_ep.Buffer(
            world.group,
            num_nvl_bytes=self.nvl_bytes,
            num_rdma_bytes=self.rdma_bytes,
            num_qps_per_rank=max(1, plan.transport.num_qps),
            explicitly_destroy=True,
        )
        self._packer = Packer(plan, world.device)
        self._nowhere = _one_row(plan, world.device)
        self._worst_case = plan.transport.received_rows if plan.transport.worst_case_rows else 0

    def _hints(self, ranks: int) -> tuple[int, int]:
        """(NVLink, RDMA) bytes: the library's own hints, the larger of dispatch and combine."""
        configs = (self._dispatch_config, self._combine_config)
        row = hidden_bytes(self._plan.model.hidden)
        return (
            max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs),
            max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs),
        )

    def dispatch(self, x: torch.Tensor, route: Route, apart: bool = True) -> Pending[Batch]:
        """See Transport.dispatch. ``wait`` orders the stream after the exchange, then packs."""
        check_dispatch(x, route, self._plan)
        route = self._with_pointers(route)
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
            route.topk_ids, self._plan.num_experts, async_finish=True
        )
        received, topk_ids, weights, _, back, arrived = self._buffer.dispatch(
            _as_tuple(self._packer.to_wire(x)),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=route.topk_ids,
            topk_weights=route.topk_weights,
            num_worst_tokens=self._worst_case,
            config=self._dispatch_config,
            async_finish=True,
        )

        def finish() -> Batch:
            arrived.current_stream_wait()
            rows = Received(_as_rows(received), topk_ids, weights)
            return self._packer.pack(rows, x.shape[0], back)

        return Pending(finish)

    def _with_pointers(self, route: Route) -> Route:
        """A route without tokens, as slices of real memory.

        The kernel traps when only one of ids and weights has a null pointer, which is what a fresh
        empty tensor has and an empty slice has not.
        """
        if route.topk_ids.shape[0]:
            return route
        return Route(self._nowhere.topk_ids[:0], self._nowhere.topk_weights[:0])

    def combine(
        self, rows: torch.Tensor, batch: Batch, route: Route, apart: bool = True
    ) -> Pending[torch.Tensor]:
        """See Transport.combine."""
        arrival: Arrival = batch.handle
        combined, _, returned = self._buffer.combine(
            self._packer.unpack(rows, arrival),
            arrival.back,
            config=self._combine_config,
            async_finish=True,
        )

        def finish() -> torch.Tensor:
            returned.current_stream_wait()
            out: torch.Tensor = combined
            return out

        return Pending(finish)

    def rehearse(self, tokens: int, experts: Callable[[Batch], torch.Tensor]) -> None:
        """See Transport. DeepEP brings its kernels compiled; packing compiles at first use."""
        self._packer.rehearse(tokens, experts)

    def close(self) -> None:
        """Collective: every rank releases its buffer before the group is left."""
        self._buffer.destroy()


def _one_row(plan: Plan, device: torch.device) -> Route:
    shape = (1, plan.model.top_k)
    ids = torch.full(shape, -1, dtype=torch.int64, device=device)
    return Route(ids, torch.zeros(shape, dtype=torch.float32, device=device))


def _check_nodes(world: World) -> None:
    """One node's ranks meet over NVLink, and several nodes are taken eight ranks at a time."""
    expected = min(world.size, NODE_RANKS)
    if world.local_size != expected:
        raise ConfigError(
            f"transport.name: deepep_ht with {world.size} ranks, {world.local_size} of them on "
            f"this node; accepted: {expected} a node"
        )


def _as_tuple(rows: Rows) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return (rows.data, rows.scales) if isinstance(rows, Fp8Rows) else rows


def _as_rows(received: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Rows:
    return Fp8Rows(*received) if isinstance(received, tuple) else received
