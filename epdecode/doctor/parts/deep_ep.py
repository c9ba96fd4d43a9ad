"""DeepEP's two all-to-alls on a few rows whose way there and back is known in closed form."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from epdecode.doctor.check import Outcome, fail, ok
from epdecode.plan.limits_ht import CHUNKS
from epdecode.world import World

TOKENS, HIDDEN, TOP_K, LOCAL_EXPERTS = 16, 2048, 2, 4
FIX = "the rank logs name the first fault; `epdecode doctor --log FILE` explains known lines"


def rows_of(rank: int, device: torch.device) -> torch.Tensor:
    """bfloat16 [TOKENS, HIDDEN]: whole numbers up to 256, so that sums of two stay exact."""
    token = torch.arange(TOKENS, device=device).view(-1, 1) + rank * TOKENS
    column = torch.arange(HIDDEN, device=device).view(1, -1)
    return ((token * 31 + column) % 127 + 1).to(torch.bfloat16)


def routes_of(rank: int, size: int, device: torch.device) -> torch.Tensor:
    """int64 [TOKENS, TOP_K]: two experts, on two different ranks where there are two."""
    first = torch.arange(TOKENS, device=device) + rank
    experts = size * LOCAL_EXPERTS
    second = first + (LOCAL_EXPERTS if size > 1 else 1)
    return torch.stack([first % experts, second % experts], dim=1)


def expected_counts(world: World) -> torch.Tensor:
    """int64 [LOCAL_EXPERTS] rows that this rank's experts get from all ranks."""
    routes = torch.cat([routes_of(r, world.size, world.device) for r in range(world.size)])
    counts = torch.bincount(routes.flatten(), minlength=world.size * LOCAL_EXPERTS)
    return counts[world.rank * LOCAL_EXPERTS :][:LOCAL_EXPERTS]


def check_low_latency(world: World) -> Outcome:
    """Dispatch, combine with weights of one half each: every row comes back as it was."""
    deep_ep = importlib.import_module("deep_ep")
    experts = world.size * LOCAL_EXPERTS
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, world.size, experts)
    buffer = deep_ep.Buffer(
        world.group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=LOCAL_EXPERTS,
        explicitly_destroy=True,
    )
    x, routes = rows_of(world.rank, world.device), routes_of(world.rank, world.size, world.device)
    weights = torch.full(routes.shape, 0.5, device=world.device)
    rows, counts, handle, _, receive = buffer.low_latency_dispatch(
        x, routes, TOKENS, experts, use_fp8=False, return_recv_hook=True
    )
    receive()
    out, _, receive = buffer.low_latency_combine(
        rows, routes, weights, handle, return_recv_hook=True
    )
    receive()
    torch.cuda.synchronize()
    outcome = _compare(world, x, out, counts)
    world.barrier()
    buffer.destroy()
    return outcome


def check_high_throughput(world: World) -> Outcome:
    """Dispatch, combine without weights: every row comes back once per rank it went to."""
    if world.size not in CHUNKS:
        sizes = ", ".join(map(str, CHUNKS))
        return ok(f"not run with {world.size} rank(s): DeepEP has configs for {sizes}")
    deep_ep = importlib.import_module("deep_ep")
    buffer = _ht_buffer(deep_ep, world)
    experts = world.size * LOCAL_EXPERTS
    x, routes = rows_of(world.rank, world.device), routes_of(world.rank, world.size, world.device)
    weights = torch.full(routes.shape, 0.5, device=world.device)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(routes, experts)
    rows, _, _, counts, handle, _ = buffer.dispatch(
        x,
        topk_idx=routes,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )
    out, _, _ = buffer.combine(rows, handle)
    torch.cuda.synchronize()
    copies = in_rank.sum(dim=1, keepdim=True)
    outcome = _compare(world, x * copies, out, torch.tensor(counts, device=world.device))
    world.barrier()
    buffer.destroy()
    return outcome


def _ht_buffer(deep_ep: Any, world: World) -> Any:
    hidden_bytes = HIDDEN * 2
    configs = [
        deep_ep.Buffer.get_dispatch_config(world.size),
        deep_ep.Buffer.get_combine_config(world.size),
    ]
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, world.size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, world.size) for config in configs)
    return deep_ep.Buffer(world.group, nvl, rdma, explicitly_destroy=True)


def _compare(
    world: World, expected: torch.Tensor, out: torch.Tensor, counts: torch.Tensor
) -> Outcome:
    """Byte equality of rows and of the counts per local expert."""
    wanted = expected_counts(world)
    if counts.tolist() != wanted.tolist():
        return fail(
            f"rank {world.rank}: rows per expert {counts.tolist()}", f"{wanted.tolist()}", FIX
        )
    wrong = (out != expected).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        return fail(f"rank {world.rank}: rows {wrong[:8]} came back different", "equal", FIX)
    return ok(
        f"{TOKENS} rows of {HIDDEN} to {TOP_K} experts and back, equal, on {world.size} rank(s)"
    )
