"""Forced routes: where tokens go when the model's gate does not say. Pure; made on the host.

Each rule gives int64 [tokens, top_k] distinct global ids per token for one (layer, step) of one
rank, and depends on nothing but its arguments, so every rank can make every other's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from epdecode.weights import generator


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingJob:
    """What a rule needs to know."""

    tokens: int
    top_k: int
    num_experts: int
    world_size: int
    rank: int
    layer: int
    step: int
    seed: int


def uniform(job: RoutingJob) -> torch.Tensor:
    """top_k distinct experts, each as likely as any other."""
    gen = generator(torch.device("cpu"), "uniform", job.seed, job.rank, job.layer, job.step)
    return torch.rand(job.tokens, job.num_experts, generator=gen).argsort(dim=1)[:, : job.top_k]


def balanced(job: RoutingJob) -> torch.Tensor:
    """Every expert the same count, to within one, over the tokens of this rank.

    Token t takes the top_k experts that follow those of token t - 1; ranks start apart, so that
    small batches do not all begin at expert 0.
    """
    start = job.rank * job.tokens * job.top_k + job.layer + job.step
    first = start + torch.arange(job.tokens)[:, None] * job.top_k
    return (first + torch.arange(job.top_k)) % job.num_experts


def stress(job: RoutingJob) -> torch.Tensor:
    """Every token of every rank to experts of rank 0 (as many as it has), the worst case."""
    local = job.num_experts // job.world_size
    slots = torch.arange(job.top_k)
    ids = torch.where(slots < local, slots, torch.tensor(-1))
    return ids.expand(job.tokens, -1).clone()


RULES: dict[str, Callable[[RoutingJob], torch.Tensor]] = {
    "uniform": uniform,
    "balanced": balanced,
    "stress": stress,
}


def forced_weights(ids: torch.Tensor, scaling: float) -> torch.Tensor:
    """float32 [T, K]: equal weights over a token's chosen experts, times the model's factor."""
    chosen = (ids >= 0).sum(1, keepdim=True).clamp(min=1)
    return (scaling / chosen).expand(ids.shape).to(torch.float32).contiguous()
