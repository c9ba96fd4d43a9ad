"""DeepEP's high-throughput kernels: buffer sizes people met in public, and each rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epdecode.plan import limits_ht
from epdecode.plan.limits import Request, violations

GOOD = Request(
    transport="deepep_ht",
    wire="fp8",
    hidden=7168,
    expert_size=2048,
    top_k=8,
    num_experts=256,
    ep=8,
    max_tokens=128,
)


def test_buffer_sizes_are_the_librarys() -> None:
    chunks = limits_ht.Chunks(8, 512, 16, 128)
    assert limits_ht.nvl_bytes(chunks, 24, 7168, 16) == 453380736
    assert limits_ht.rdma_bytes(chunks, 24, 7168, 16) == 56774016


@pytest.mark.parametrize("ranks", limits_ht.RANKS)
def test_buffers_take_the_larger_of_dispatch_and_combine(ranks: int) -> None:
    nvl, rdma = limits_ht.buffer_bytes(7168, ranks, 20)
    both = limits_ht.CHUNKS[ranks]
    assert nvl == max(limits_ht.nvl_bytes(chunks, 20, 14336, ranks) for chunks in both)
    assert rdma == max(limits_ht.rdma_bytes(chunks, 20, 14336, ranks) for chunks in both)
    assert nvl % 128 == rdma % 128 == 0
    assert (rdma > 0) == (ranks > 8)


def test_a_receive_window_is_rounded_up_to_whole_sends() -> None:
    odd, even = limits_ht.Chunks(36, 288, 20, 128), limits_ht.Chunks(36, 288, 20, 140)
    assert limits_ht.rdma_bytes(odd, 20, 14336, 16) == limits_ht.rdma_bytes(even, 20, 14336, 16)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_good_requests_break_nothing(ranks: int, wire: str) -> None:
    assert violations(replace(GOOD, ep=ranks, wire=wire)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ep": 1, "num_experts": 8, "top_k": 2}, "nobody to send to: transport.name=deepep_ll"),
        ({"ep": 6, "num_experts": 96}, "accepted: 2, 4 or 8 on one node, or 16, 24, 32"),
        ({"ep": 12, "num_experts": 96}, "(nearest 8)"),
        ({"ep": 40, "num_experts": 320}, "(nearest 32)"),
        ({"comm_sms": 21}, "21; accepted: even numbers from 2 to 132 (nearest 22)"),
        ({"comm_sms": 200}, "(nearest 132)"),
        ({"ep": 2, "num_experts": 384}, "192 experts a rank; accepted: at most 128 (nearest rank"),
        ({"hidden": 8192, "wire": "bf16"}, "multiples of 16 up to 8176 (nearest 8176)"),
        ({"hidden": 7176, "wire": "bf16"}, "(nearest 7168)"),
        ({"hidden": 2944, "ep": 16}, "multiples of 256 up to 16128 (nearest 3072)"),
        ({"ep": 160, "num_experts": 320, "comm_sms": 64}, "at most 2 GiB can be addressed"),
    ],
)
def test_each_broken_rule_is_named_with_the_nearest_legal_value(
    change: dict[str, object], said: str
) -> None:
    broken = violations(replace(GOOD, **change))
    assert len(broken) == 1
    assert said in broken[0]
    assert "deepep_ht; DeepEP 1.2.1" in broken[0]


def test_the_smallest_case_of_the_table_passes() -> None:
    small = replace(GOOD, ep=2, num_experts=8, top_k=2, max_tokens=1, hidden=256)
    assert violations(small) == []
