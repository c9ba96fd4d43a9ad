"""What a row of the table of limits is: a request's numbers, and a rule over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The numbers a transport and a GEMM are asked for."""

    transport: str
    wire: str
    hidden: int
    expert_size: int
    top_k: int
    num_experts: int
    ep: int
    max_tokens: int
    num_sms: int = 132
    """SMs of the device."""
    comm_sms: int = 20
    """SMs that the high-throughput kernels run on."""
    qp_depth_set: int | None = None
    """NVSHMEM_QP_DEPTH where the environment sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One rule of one library."""

    key: str
    transports: tuple[str, ...]
    source: str
    check: Callable[[Request], str | None]
    """What is wrong and the nearest legal value, or None."""


def nearest_of(value: int, legal: tuple[int, ...]) -> int:
    """The legal value closest to ``value``."""
    return min(legal, key=lambda candidate: abs(candidate - value))
