"""DeepEP's low-latency all-to-all: fixed slots, no host wait, capturable.

One buffer for the life of the transport, with one (max_tokens, hidden, num_experts): the address
of every slot and counter follows from them. DeepEP alternates two halves of the buffer at each
call, and a send clears the counters of the other half, so a receive must come before the next
send; a graph must hold an even number of calls. One dispatch and one combine per layer keep both.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import deep_ep
import torch

from epdecode.batch import Batch, Fp8Rows, MaskedBatch, Pending, Route
from epdecode.plan import Plan
from epdecode.transport.checks import check_dispatch
from epdecode.transport.rehearsal import expected_rows, masked_batch
from epdecode.world import World


class DeepEPLowLatency:
    """Masked batches; FP8 is quantised inside dispatch, router weights are applied in combine."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan = plan
        self._device = world.device
        self._fp8 = plan.transport.wire == "fp8"
        self._ue8m0 = self._fp8 and plan.experts.scale_format == "ue8m0"
        # Read by NVSHMEM when the buffer is built, and by nothing after.
        os.environ["NVSHMEM_QP_DEPTH"] = str(plan.transport.qp_depth)
        self.buffer_bytes: int = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            plan.max_tokens, plan.model.hidden, world.size, plan.num_experts
        )
        self._buffer = deep_ep.Buffer(
            world.group,
            num_rdma_bytes=self.buffer_bytes,
            low_latency_mode=True,
            num_qps_per_rank=plan.transport.num_qps,
            explicitly_destroy=True,
        )

    def dispatch(self, x: torch.Tensor, route: Route, apart: bool = True) -> Pending[Batch]:
        """See Transport.dispatch. The receive is enqueued in ``wait``, or with the send.

        Two launches are two kernels' start and end, and keep no SM busy in between.
        """
        check_dispatch(x, route, self._plan)
        packed, counts, handle, _, receive = self._buffer.low_latency_dispatch(
            x.contiguous(),
            route.topk_ids,
            self._plan.max_tokens,
            self._plan.num_experts,
            use_fp8=self._fp8,
            round_scale=self._ue8m0,
            use_ue8m0=self._ue8m0,
            async_finish=False,
            return_recv_hook=apart,
        )
        batch = MaskedBatch(
            rows=Fp8Rows(*packed) if self._fp8 else packed,
            counts=counts,
            expected_rows=expected_rows(self._plan, x.shape[0]),
            handle=handle,
        )

        def finish() -> Batch:
            if apart:
                receive()
            return batch

        return Pending(finish)

    def combine(
        self, rows: torch.Tensor, batch: Batch, route: Route, apart: bool = True
    ) -> Pending[torch.Tensor]:
        """See Transport.combine."""
        combined, _, receive = self._buffer.low_latency_combine(
            rows,
            route.topk_ids,
            route.topk_weights,
            batch.handle,
            async_finish=False,
            return_recv_hook=apart,
        )

        def finish() -> torch.Tensor:
            if apart:
                receive()
            out: torch.Tensor = combined
            return out

        return Pending(finish)

    def rehearse(self, tokens: int, experts: Callable[[Batch], torch.Tensor]) -> None:
        """See Transport. DeepEP brings its kernels compiled."""
        experts(masked_batch(self._plan, self._device, tokens))

    def close(self) -> None:
        """Collective: every rank releases its buffer before the group is left."""
        self._buffer.destroy()
