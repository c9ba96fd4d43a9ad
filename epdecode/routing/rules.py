"""Forced routes: where tokens go when the model's gate does not say. Pure; made on the host.

Each rule gives int64 [tokens, top_k] distinct logical ids per token (-1 = none) for one (layer,
step) of one rank, and depends on nothing but its arguments, so every rank can make every other's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from epdecode.routing.load import first_block
from epdecode.weights.seeded import generator


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
    share: float = 0.0
    """routing.share."""
    weights: torch.Tensor | None = None
    """drawn: float64 [num_experts], how likely each expert is against the others."""
    recorded: torch.Tensor | None = None
    """trace: int64 [tokens, top_k], this rank's part of the recording."""

    def generator(self, kind: str) -> torch.Generator:
        """Seeded by everything that tells this job from another."""
        names = (kind, self.seed, self.rank, self.layer, self.step)
        return generator(torch.device("cpu"), *names)


def uniform(job: RoutingJob) -> torch.Tensor:
    """top_k distinct experts, each as likely as any other."""
    drawn = torch.rand(job.tokens, job.num_experts, generator=job.generator("uniform"))
    return drawn.argsort(dim=1)[:, : job.top_k]


def drawn(job: RoutingJob) -> torch.Tensor:
    """top_k experts one after the other without putting back, by weight: the largest of
    log(weight) + Gumbel noise."""
    if job.weights is None:
        raise ValueError("a drawn route needs weights")
    noise = torch.rand(
        job.tokens, job.num_experts, dtype=torch.float64, generator=job.generator("drawn")
    )
    gumbel = -torch.log(-torch.log(noise))
    return (job.weights.log() + gumbel).topk(job.top_k, dim=1).indices


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
    local = first_block(job.num_experts, job.world_size)
    slots = torch.arange(job.top_k)
    ids = torch.where(slots < local, slots, torch.tensor(-1))
    return ids.expand(job.tokens, -1).clone()


def hot_rank(job: RoutingJob) -> torch.Tensor:
    """Each of a token's choices falls on rank 0's experts with probability ``share``.

    A token cannot choose more experts than there are: what is too many on one side goes to the
    other. Within a side every expert is as likely as any other.
    """
    gen = job.generator("hot_rank")
    local = first_block(job.num_experts, job.world_size)
    hot = (torch.rand(job.tokens, job.top_k, generator=gen) < job.share).sum(1)
    hot = hot.clamp(max(0, job.top_k - (job.num_experts - local)), min(local, job.top_k))
    order = torch.rand(job.tokens, job.num_experts, generator=gen)
    # Ranks of the random numbers within each side: 0 is chosen first.
    places = torch.cat((_places(order[:, :local]), _places(order[:, local:])), dim=1)
    wanted = torch.where(
        torch.arange(job.num_experts) < local, hot[:, None], job.top_k - hot[:, None]
    )
    chosen = (places < wanted).to(torch.int8)
    return chosen.topk(job.top_k, dim=1).indices


def hot_expert(job: RoutingJob) -> torch.Tensor:
    """Expert 0 is among the choices of ``share`` of the tokens; all others are equally likely."""
    gen = job.generator("hot_expert")
    order = torch.rand(job.tokens, job.num_experts, generator=gen)
    hot = torch.rand(job.tokens, generator=gen) < job.share
    order[:, 0] = torch.where(hot, 2.0, -1.0)
    return order.topk(job.top_k, dim=1).indices


def trace(job: RoutingJob) -> torch.Tensor:
    """What was recorded."""
    if job.recorded is None:
        raise ValueError("a trace route needs a recording")
    return job.recorded


RULES: dict[str, Callable[[RoutingJob], torch.Tensor]] = {
    "uniform": uniform,
    "balanced": balanced,
    "zipf": drawn,
    "lognormal": drawn,
    "load_table": drawn,
    "hot_rank": hot_rank,
    "hot_expert": hot_expert,
    "stress": stress,
    "trace": trace,
}


def forced_weights(ids: torch.Tensor, scaling: float) -> torch.Tensor:
    """float32 [T, K]: equal weights over a token's chosen experts, times the model's factor."""
    chosen = (ids >= 0).sum(1, keepdim=True).clamp(min=1)
    return (scaling / chosen).expand(ids.shape).to(torch.float32).contiguous()


def _places(values: torch.Tensor) -> torch.Tensor:
    """Each value's rank among those of its row, the smallest 0."""
    return values.argsort(dim=1).argsort(dim=1)
