"""A stand-in for deep_ep's low-latency Buffer on gloo, which polices what the real one corrupts.

Same packed layout, two alternating halves, receive before the next send, one (max_tokens, hidden,
num_experts) for life. Breaking a rule raises FakeMisuse; rows nobody sent are NaN; rows of one
expert come in no particular order; dispatched rows are spoiled two dispatches later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from epdecode.kernels.fp8 import quantize_ref
from epdecode.plan.limits import LL_HIDDEN, LL_MAX_TOKENS, LL_MAX_TOP_K, low_latency_bytes


class FakeMisuse(Exception):
    """The real library would hang, trap or corrupt memory here."""


def require(holds: bool, rule: str) -> None:
    if not holds:
        raise FakeMisuse(rule)


def install() -> None:
    """Make ``import deep_ep`` find this module in the current process."""
    sys.modules["deep_ep"] = sys.modules[__name__]


class Buffer:
    """The low-latency part of deep_ep.Buffer."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
    ) -> None:
        require(num_rdma_bytes % 128 == 0, "sizes in multiples of 128")
        require(low_latency_mode, "low-latency calls need low_latency_mode")
        self.group = group
        self.size = group.size()
        require(self.size < 8 or self.size % 8 == 0, "ranks: fewer than 8 or a multiple of 8")
        self.num_rdma_bytes = num_rdma_bytes
        self.num_qps_per_rank = num_qps_per_rank
        self.explicitly_destroy = explicitly_destroy
        self.qp_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
        self.shape: tuple[int, int, int] | None = None
        self.awaiting: str | None = None
        self.calls = 0
        self.results: list[torch.Tensor] = []
        self.destroyed = False

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, tuple, None, Callable[[], None] | None]:
        most, hidden = num_max_dispatch_tokens_per_rank, x.shape[1]
        self._police(x, topk_idx, most, num_experts, use_fp8)
        require(not async_finish, "an event is not a hook")
        require(round_scale or not use_ue8m0, "UE8M0 needs round_scale")
        self._begin("dispatch")
        local = num_experts // self.size
        arrived, counts, origins = self._exchange(x, topk_idx, local)
        scale_format = "ue8m0" if use_ue8m0 else "fp32"
        rows = torch.full((local, self.size * most, hidden), torch.nan, dtype=torch.bfloat16)
        packed: Any = rows
        if use_fp8:
            width = hidden // 512 if use_ue8m0 else hidden // 128
            dtype = torch.int32 if use_ue8m0 else torch.float32
            data = torch.full(rows.shape, torch.nan).to(torch.float8_e4m3fn)
            fresh = torch.full((local, width, rows.shape[1]), -1, dtype=dtype)
            packed = (data, fresh.transpose(1, 2))
        landed = torch.full((local,), -1, dtype=torch.int32)

        def receive() -> None:
            self._end("dispatch")
            landed.copy_(counts)
            for expert in range(local):
                here = arrived[expert]
                if use_fp8:
                    made = quantize_ref(here, scale_format)
                    packed[0][expert, : len(here)] = made.data
                    packed[1][expert, : len(here)] = made.scales
                else:
                    rows[expert, : len(here)] = here

        self._keep(packed[0] if use_fp8 else rows)
        handle = (origins, counts, most, hidden, num_experts)
        if not return_recv_hook:
            receive()
        return packed, landed, handle, None, receive if return_recv_hook else None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor, None, Callable[[], None] | None]:
        origins, counts, most, hidden, num_experts = handle
        require(x.is_contiguous() and x.dtype == torch.bfloat16, "combine takes dense bfloat16")
        require(topk_weights.dtype == torch.float32, "router weights are float32")
        require(
            x.shape == (num_experts // self.size, self.size * most, hidden), "rows of the dispatch"
        )
        self._begin("combine")
        home = self._return(x, counts, origins, topk_idx.shape[0] * topk_idx.shape[1])
        combined = torch.full((topk_idx.shape[0], hidden), torch.nan, dtype=torch.bfloat16)

        def receive() -> None:
            self._end("combine")
            total = torch.zeros(combined.shape, dtype=torch.float32)
            for token in range(topk_idx.shape[0]):
                for slot in range(topk_idx.shape[1]):
                    if topk_idx[token, slot] >= 0:
                        row = home[token * topk_idx.shape[1] + slot]
                        total[token] += row.float() * topk_weights[token, slot]
            combined.copy_(total)

        if not return_recv_hook:
            receive()
        return combined, None, receive if return_recv_hook else None

    def destroy(self) -> None:
        require(self.explicitly_destroy, "destroy needs explicitly_destroy")
        require(not self.destroyed, "destroyed twice")
        require(self.awaiting is None, "destroyed while a receive is open")
        self.destroyed = True
        dist.barrier(group=self.group)

    def _police(
        self, x: torch.Tensor, topk_idx: torch.Tensor, most: int, num_experts: int, use_fp8: bool
    ) -> None:
        hidden = x.shape[1]
        require(x.dtype == torch.bfloat16 and x.is_contiguous(), "dispatch takes dense bfloat16")
        require(topk_idx.dtype == torch.int64, "topk_idx is int64")
        require(hidden in LL_HIDDEN, f"unsupported hidden {hidden}")
        require(not use_fp8 or hidden % 512 == 0, "FP8 needs hidden % 512 == 0")
        require(x.shape[0] <= most <= LL_MAX_TOKENS, "x.size(0) <= num_max_dispatch_tokens")
        require(num_experts % self.size == 0, "experts divide over ranks")
        require(topk_idx.shape[1] <= LL_MAX_TOP_K, "top-k at most 11")
        require((self.size * most) % 4 == 0, "ranks * tokens is a multiple of 4")
        require(self.num_qps_per_rank >= num_experts // self.size, "a QP per local expert")
        require(self.qp_depth >= 2 * (most + 1), "QP depth")
        require(
            low_latency_bytes(most, hidden, num_experts) <= self.num_rdma_bytes,
            "layout.total_bytes <= num_rdma_bytes",
        )
        shape = (most, hidden, num_experts)
        require(self.shape in (None, shape), f"buffer used with {self.shape}, then {shape}")
        self.shape = shape

    def _begin(self, call: str) -> None:
        require(not self.destroyed, "called after destroy")
        require(
            self.awaiting is None,
            f"{call} sent while the receive of {self.awaiting} is open: its counters are cleared",
        )
        self.awaiting = call
        self.calls += 1

    def _end(self, call: str) -> None:
        require(self.awaiting == call, f"receive of {call} called twice or out of order")
        self.awaiting = None

    def _keep(self, result: torch.Tensor) -> None:
        self.results.append(result)
        if len(self.results) > 2:
            old = self.results.pop(0)
            old.copy_(torch.full(old.shape, torch.nan).to(old.dtype))

    def _exchange(
        self, x: torch.Tensor, topk_idx: torch.Tensor, local: int
    ) -> tuple[list[torch.Tensor], torch.Tensor, list[list[tuple[int, int]]]]:
        """Rows for each local expert, shuffled; their counts; (rank, slot) of each."""
        everyone = self._gather(x.float(), topk_idx)
        mine = range(self.group.rank() * local, (self.group.rank() + 1) * local)
        rows, origins = [], []
        for expert in mine:
            found = [
                (rank, int(slot), table[int(slot) // topk_idx.shape[1]])
                for rank, (table, ids) in enumerate(everyone)
                for slot in torch.nonzero(ids.flatten() == expert).flatten()
            ]
            order = torch.randperm(len(found)).tolist()
            origins.append([(found[i][0], found[i][1]) for i in order])
            rows.append(
                torch.stack([found[i][2] for i in order]).to(torch.bfloat16)
                if found
                else torch.empty(0, x.shape[1], dtype=torch.bfloat16)
            )
        return rows, torch.tensor([len(r) for r in rows], dtype=torch.int32), origins

    def _gather(
        self, x: torch.Tensor, ids: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([x.shape[0]]), group=self.group)
        most = max(int(size) for size in sizes)
        padded = torch.zeros(most, x.shape[1])
        padded[: x.shape[0]] = x
        padded_ids = torch.full((most, ids.shape[1]), -1, dtype=torch.int64)
        padded_ids[: x.shape[0]] = ids
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        all_ids = [torch.empty_like(padded_ids) for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self.group)
        dist.all_gather(all_ids, padded_ids, group=self.group)
        return list(zip(rows, all_ids, strict=True))

    def _return(
        self,
        x: torch.Tensor,
        counts: torch.Tensor,
        origins: list[list[tuple[int, int]]],
        slots: int,
    ) -> dict[int, torch.Tensor]:
        """Rows back at their source: flat slot -> row."""
        by_rank: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(self.size)]
        for expert, places in enumerate(origins):
            for row, (rank, slot) in enumerate(places):
                by_rank[rank].append((slot, x[expert, row]))
        home: dict[int, torch.Tensor] = {}
        for source in range(self.size):
            for target in range(self.size):
                self._pass_on(by_rank, source, target, home, x.shape[2])
        return home

    def _pass_on(
        self,
        by_rank: list[list[tuple[int, torch.Tensor]]],
        source: int,
        target: int,
        home: dict[int, torch.Tensor],
        hidden: int,
    ) -> None:
        me = self.group.rank()
        if me == source:
            slots = torch.tensor([slot for slot, _ in by_rank[target]], dtype=torch.int64)
            rows = [row.float() for _, row in by_rank[target]]
            sent = torch.stack(rows) if rows else torch.zeros(0, hidden)
            if target == me:
                home.update({int(s): r for s, r in zip(slots, sent, strict=True)})
                return
            dist.send(torch.tensor([len(rows)]), target, group=self.group)
            if rows:
                dist.send(slots, target, group=self.group)
                dist.send(sent, target, group=self.group)
        elif me == target:
            count = torch.zeros(1, dtype=torch.int64)
            dist.recv(count, source, group=self.group)
            if int(count):
                slots = torch.zeros(int(count), dtype=torch.int64)
                rows = torch.zeros(int(count), hidden)
                dist.recv(slots, source, group=self.group)
                dist.recv(rows, source, group=self.group)
                home.update({int(s): r for s, r in zip(slots, rows, strict=True)})
