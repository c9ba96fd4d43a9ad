"""A stand-in for deep_ep's high-throughput calls on gloo, which polices what the real ones corrupt.

One node. Results may be read only after their event was waited for: until then they are NaN, as
are rows that nobody sent. Rows arrive by source rank, then in token order. Breaking a rule raises
FakeMisuse. ``install`` also offers the low-latency double, so that one process can hold both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from epdecode.plan import limits_ht
from tests.fakes import deep_ep as low_latency
from tests.fakes.deep_ep import FakeMisuse, require

__all__ = ["Buffer", "Config", "FakeMisuse", "install"]

Wire = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def install() -> None:
    """Make ``import deep_ep`` find both doubles in the current process."""
    module = ModuleType("deep_ep")
    module.Buffer = Buffer  # type: ignore[attr-defined]
    module.Config = Config  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module


class Config:
    """deep_ep.Config: SMs and rows in flight."""

    def __init__(self, num_sms: int, *chunks: int) -> None:
        self.num_sms = num_sms
        self.chunks = limits_ht.Chunks(*chunks)
        require(self.chunks.nvl_send < self.chunks.nvl_receive, "send < receive")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return limits_ht.nvl_bytes(self.chunks, self.num_sms, hidden_bytes, num_ranks)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return limits_ht.rdma_bytes(self.chunks, self.num_sms, hidden_bytes, num_ranks)


class Event:
    """deep_ep.EventOverlap: work on the communication stream, done when waited for."""

    def __init__(self, buffer: Buffer, work: Callable[[], None]) -> None:
        self._buffer = buffer
        self._work: Callable[[], None] | None = work
        buffer.open_events += 1

    def current_stream_wait(self) -> None:
        if self._work:
            self._work()
            self._work = None
            self._buffer.open_events -= 1


@dataclass(frozen=True)
class Handle:
    """sources: rank of each received row; tokens: its token there; sent_to: bool [T, ranks]."""

    sources: list[int]
    tokens: list[int]
    sent_to: torch.Tensor
    rows: int


class Buffer:
    """deep_ep.Buffer: the low-latency double when asked for that mode, else this one."""

    num_sms = 20

    def __new__(cls, group: dist.ProcessGroup, **options: Any) -> Any:
        if options.get("low_latency_mode"):
            return low_latency.Buffer(group, **options)
        return super().__new__(cls)

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
    ) -> None:
        self.group, self.size = group, group.size()
        require(self.size in (2, 4, 8), "compiled for 2, 4 or 8 ranks on a node")
        require(num_nvl_bytes % 128 == 0, "sizes in multiples of 128")
        require(num_rdma_bytes == 0, "RDMA only with more than 8 ranks or low latency")
        require(num_qps_per_rank > 0, "a queue pair at least")
        self.num_nvl_bytes = num_nvl_bytes
        self.explicitly_destroy = explicitly_destroy
        self.open_events = 0
        self.destroyed = False

    get_low_latency_rdma_size_hint = staticmethod(low_latency.Buffer.get_low_latency_rdma_size_hint)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        require(new_num_sms % 2 == 0, "the SM count must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return _config(num_ranks, 0)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return _config(num_ranks, 1)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, Event]:
        require(topk_idx.dtype == torch.int64 and topk_idx.dim() == 2, "topk_idx int64 [T, K]")
        require(topk_idx.is_contiguous(), "topk_idx is contiguous")
        require(not allocate_on_comm_stream or async_finish, "allocation there needs async")
        in_rank = self._in_rank(topk_idx, num_experts)
        chosen = topk_idx[topk_idx >= 0]
        per_expert = torch.bincount(chosen, minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, _done(self)

    def dispatch(
        self,
        x: Wire,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        async_finish: bool = False,
    ) -> tuple[Wire, torch.Tensor, torch.Tensor, list[int], Handle, Event]:
        require(not self.destroyed, "called after destroy")
        require(topk_idx is not None and topk_weights is not None, "ids and weights together")
        require(num_tokens_per_expert is not None, "the layout comes first")
        num_experts = num_tokens_per_expert.numel()
        parts = x if isinstance(x, tuple) else (x,)
        self._police(parts, topk_idx, topk_weights, config)
        made = self._in_rank(topk_idx, num_experts)
        require(torch.equal(is_token_in_rank, made), "the layout is of these ids")
        require(torch.equal(num_tokens_per_rank, made.sum(0).int()), "the layout is of these ids")
        local = num_experts // self.size
        everyone = [self._gather(part) for part in (*parts, topk_idx, topk_weights, made)]
        me = self.group.rank()
        found = [
            (source, int(token))
            for source in range(self.size)
            for token in torch.nonzero(everyone[-1][source][:, me]).flatten()
        ]
        rows = num_worst_tokens or len(found)
        require(rows >= len(found), "more rows arrive than num_worst_tokens: memory is overwritten")
        landed = [_fresh(rows, part) for part in parts]
        ids = torch.full((rows, topk_idx.shape[1]), 2**40, dtype=torch.int64)
        weights = torch.full(ids.shape, torch.nan)

        def arrive() -> None:
            for row, (source, token) in enumerate(found):
                for target, table in zip(landed, everyone, strict=False):
                    target[row] = table[source][token]
                ids[row], weights[row] = _as_local(
                    everyone[-3][source][token], everyone[-2][source][token], me * local, local
                )
            ids[len(found) :] = -1

        back = Handle([s for s, _ in found], [t for _, t in found], made, rows)
        received = (landed[0], landed[1]) if isinstance(x, tuple) else landed[0]
        counts = _expert_list(everyone[-3], me * local, local, expert_alignment)
        return (
            received,
            ids,
            weights,
            [] if num_worst_tokens else counts,
            back,
            self._event(arrive, async_finish),
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        config: Config | None = None,
        async_finish: bool = False,
    ) -> tuple[torch.Tensor, None, Event]:
        require(not self.destroyed, "called after destroy")
        require(x.dtype == torch.bfloat16 and x.is_contiguous(), "combine takes dense bfloat16")
        require(x.shape[0] == handle.rows, "src_idx.size(0) == num_tokens")
        require(config is not None and config.num_sms == Buffer.num_sms, "one SM count for all")
        real = x[: len(handle.sources)]
        everyone = self._gather(real)
        origins = self._gather(torch.tensor([handle.sources, handle.tokens], dtype=torch.int64).T)
        combined = torch.full((handle.sent_to.shape[0], x.shape[1]), torch.nan, dtype=x.dtype)
        me = self.group.rank()

        def arrive() -> None:
            total = torch.zeros(combined.shape)
            for rows, places in zip(everyone, origins, strict=True):
                for row, (source, token) in zip(rows, places.tolist(), strict=True):
                    if source == me:
                        total[token] += row.float()
            combined.copy_(total)

        return combined, None, self._event(arrive, async_finish)

    def destroy(self) -> None:
        require(self.explicitly_destroy, "destroy needs explicitly_destroy")
        require(not self.destroyed, "destroyed twice")
        require(self.open_events == 0, "destroyed while a result was not waited for")
        self.destroyed = True
        dist.barrier(group=self.group)

    def _police(
        self,
        parts: tuple[torch.Tensor, ...],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        config: Config | None,
    ) -> None:
        x = parts[0]
        require(config is not None and config.num_sms == Buffer.num_sms, "one SM count for all")
        require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
        require(topk_weights.dtype == torch.float32, "router weights are float32")
        require(x.shape[0] == topk_idx.shape[0] == topk_weights.shape[0], "a route per token")
        # The real kernel compares pointers: an empty slice has one, a fresh empty tensor has none.
        pointers = [part.untyped_storage().data_ptr() for part in (topk_idx, topk_weights)]
        require((pointers[0] == 0) == (pointers[1] == 0), "(topk_idx == nullptr) == (topk_weights")
        if len(parts) == 2:
            require(x.dtype == torch.float8_e4m3fn, "x.element_size() == 1")
            require(parts[1].dtype in (torch.float32, torch.int32), "scales float32 or int32")
            require(parts[1].shape[0] == x.shape[0], "x_scales->size(0) == num_tokens")
        else:
            require(x.dtype == torch.bfloat16, "rows are bfloat16 or FP8 with scales")
        half = x.shape[1] * x.element_size() // 2
        require(half + 8 <= 8192 and half % 16 == 0, "half a row goes through shared memory")
        need = config.get_nvl_buffer_size_hint(2 * x.shape[1], self.size)
        require(need <= self.num_nvl_bytes, "the buffer is smaller than the config's hint")

    def _in_rank(self, topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
        require(num_experts % self.size == 0, "experts divide over ranks")
        owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.size), -1)
        return torch.stack([(owner == rank).any(1) for rank in range(self.size)], 1)

    def _event(self, work: Callable[[], None], async_finish: bool) -> Event:
        event = Event(self, work)
        if not async_finish:
            event.current_stream_wait()
        return event

    def _gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's rows, moved as bytes."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([rows.shape[0]]), group=self.group)
        most = max(1, *(int(size) for size in sizes))
        data = rows.contiguous().view(torch.uint8)
        padded = torch.zeros(most, data.shape[1], dtype=torch.uint8)
        padded[: rows.shape[0]] = data
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return [
            part[: int(size)].contiguous().view(rows.dtype)
            for part, size in zip(parts, sizes, strict=True)
        ]


def _config(num_ranks: int, which: int) -> Config:
    require(num_ranks in limits_ht.CHUNKS, f"Unsupported number of EP ranks: {num_ranks}")
    chunks = limits_ht.CHUNKS[num_ranks][which]
    return Config(
        Buffer.num_sms, chunks.nvl_send, chunks.nvl_receive, chunks.rdma_send, chunks.rdma_receive
    )


def _done(buffer: Buffer) -> Event:
    event = Event(buffer, lambda: None)
    event.current_stream_wait()
    return event


def _fresh(rows: int, like: torch.Tensor) -> torch.Tensor:
    """Rows nobody wrote: NaN, or all bits set."""
    shape = (rows, like.shape[1])
    if like.dtype.is_floating_point:
        return torch.full(shape, torch.nan).to(like.dtype)
    return torch.full(shape, -1, dtype=like.dtype)


def _as_local(
    ids: torch.Tensor, weights: torch.Tensor, first: int, local: int
) -> tuple[torch.Tensor, torch.Tensor]:
    here = (ids >= first) & (ids < first + local)
    return torch.where(here, ids - first, -1), torch.where(here, weights, 0.0)


def _expert_list(tables: list[torch.Tensor], first: int, local: int, alignment: int) -> list[int]:
    ids = torch.cat([table.flatten() for table in tables])
    counts = [int((ids == first + expert).sum()) for expert in range(local)]
    return [-(-count // alignment) * alignment for count in counts]
