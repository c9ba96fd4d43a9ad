"""The double itself: what it must refuse, and what it must allow."""

from __future__ import annotations

from collections.abc import Callable

import torch

from epdecode.world import World
from tests.fakes.deep_ep import Buffer, FakeMisuse
from tests.ranks import run_ranks

MAX, HIDDEN, EXPERTS = 4, 2048, 4


def make(world: World, max_tokens: int = MAX) -> Buffer:
    size = Buffer.get_low_latency_rdma_size_hint(max_tokens, HIDDEN, world.size, EXPERTS)
    return Buffer(
        world.group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS,
        explicitly_destroy=True,
    )


def send(buffer: Buffer, max_tokens: int = MAX, tokens: int = 2) -> Callable[[], None]:
    x = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
    ids = torch.zeros(tokens, 2, dtype=torch.int64)
    return buffer.low_latency_dispatch(
        x, ids, max_tokens, EXPERTS, use_fp8=False, return_recv_hook=True
    )[4]


def raised(action: Callable[[], object]) -> str:
    try:
        action()
    except FakeMisuse as error:
        return str(error)
    return ""


def orders(world: World) -> dict[str, str]:
    said = {}
    buffer = make(world)
    send(buffer)()
    send(buffer)()
    said["a"] = "allowed"
    send(buffer)
    said["b"] = raised(lambda: send(buffer))
    buffer.awaiting = None
    receive = send(buffer)
    receive()
    said["twice"] = raised(receive)
    said["limit"] = raised(lambda: send(make(world), max_tokens=8))
    used = make(world, 8)
    send(used, 8)()
    said["varied"] = raised(lambda: send(used, 4))
    said["tokens"] = raised(lambda: send(make(world), tokens=5))
    open_one = make(world)
    send(open_one)
    said["destroy"] = raised(open_one.destroy)
    return said


def test_orders_and_sizes_that_corrupt_the_real_buffer() -> None:
    (said,) = run_ranks(1, orders)
    assert said["a"] == "allowed"
    assert "sent while the receive of dispatch is open" in said["b"]
    assert "twice or out of order" in said["twice"]
    assert "layout.total_bytes <= num_rdma_bytes" in said["limit"]
    assert "buffer used with (8, 2048, 4), then (4, 2048, 4)" in said["varied"]
    assert "num_max_dispatch_tokens" in said["tokens"]
    assert "receive is open" in said["destroy"]


def slow_hint(world: World) -> str:
    size = Buffer.get_low_latency_rdma_size_hint(MAX, HIDDEN, world.size, EXPERTS)
    buffer = Buffer(
        world.group, num_rdma_bytes=size - 256, low_latency_mode=True, num_qps_per_rank=EXPERTS
    )
    return raised(lambda: send(buffer))


def test_a_buffer_below_the_hint_is_refused_at_the_first_dispatch() -> None:
    assert "layout.total_bytes" in run_ranks(1, slow_hint)[0]
