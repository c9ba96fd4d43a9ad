"""Who says where a token goes: the model's gate, or a route given from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from epdecode.batch import Route
from epdecode.errors import UserError
from epdecode.kernels.gate import gate_logits, gate_logits_ref
from epdecode.kernels.router import RouterRule, router, router_ref
from epdecode.models import ModelShape


@dataclass(frozen=True, slots=True)
class GateOps:
    """logits(normed, gate), which topk(logits, bias, rule, num_tokens) makes a Route of."""

    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    topk: Callable[[torch.Tensor, torch.Tensor | None, RouterRule, torch.Tensor], Route]


KERNELS = GateOps(gate_logits, router)
PLAIN = GateOps(gate_logits_ref, router_ref)


class Router(Protocol):
    """Chooses experts for normed hidden states."""

    def __call__(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> Route:
        """The route of normed [T, H]; rows from num_tokens (int32 [1], on the device) on get -1."""
        ...

    def plain(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> Route:
        """The same choice in plain torch and float32, for verification."""
        ...


class GateRouter:
    """The model's gate: logits, scores, bias, groups, top-k, weights."""

    def __init__(
        self, gate: torch.Tensor, bias: torch.Tensor | None, rule: RouterRule, ops: GateOps
    ) -> None:
        self._gate = gate
        self._bias = bias
        self._rule = rule
        self._ops = ops

    def __call__(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> Route:
        """See Router."""
        return self._route(self._ops, normed, num_tokens)

    def plain(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> Route:
        """See Router."""
        return self._route(PLAIN, normed, num_tokens)

    def _route(self, ops: GateOps, normed: torch.Tensor, num_tokens: torch.Tensor) -> Route:
        return ops.topk(ops.logits(normed, self._gate), self._bias, self._rule, num_tokens)


class ForcedRouter:
    """A route written into fixed buffers before the step, so that a graph can hold it."""

    def __init__(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._ids = ids
        self._weights = weights

    def __call__(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> Route:
        """See Router; the writer of the buffers has put -1 into padded rows."""
        rows = normed.shape[0]
        return Route(self._ids[:rows], self._weights[:rows])

    def plain(self, normed: torch.Tensor, num_tokens: torch.Tensor) -> Route:
        """See Router; what was given is what it is."""
        return self(normed, num_tokens)


def rule_of(model: ModelShape) -> RouterRule:
    """The gate's rule of a model."""
    shape = model.router
    return RouterRule(
        top_k=model.top_k,
        scoring="softmax_after_topk" if shape.softmax_after_topk else shape.scoring,
        n_group=shape.n_group,
        topk_group=shape.topk_group,
        group_score=shape.group_score,
        norm_topk_prob=shape.norm_topk_prob,
        routed_scaling_factor=shape.routed_scaling_factor,
    )


def make_route(topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> Route:
    """A Route from a caller's tensors, converted by value; waits for the device.

    topk_ids: any integer dtype [T, K] in [-1, num_experts); topk_weights: any float dtype [T, K].
    Raises UserError for a float id tensor, unlike shapes, and ids out of range (token and slot).
    """
    if topk_ids.is_floating_point() or topk_ids.is_complex() or topk_ids.dtype == torch.bool:
        raise UserError(f"topk_ids: got {topk_ids.dtype}; accepted: an integer dtype")
    if not topk_weights.is_floating_point():
        raise UserError(f"topk_weights: got {topk_weights.dtype}; accepted: a float dtype")
    if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape:
        raise UserError(
            f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}: "
            "accepted: two tensors of the same [tokens, top_k]"
        )
    ids = topk_ids.to(torch.int64).contiguous()
    outside = torch.nonzero((ids < -1) | (ids >= num_experts))
    if outside.numel():
        token, slot = outside[0].tolist()
        raise UserError(
            f"topk_ids: token {token}, slot {slot} is {int(ids[token, slot])}; accepted: -1 to "
            f"{num_experts - 1}"
        )
    return Route(ids, topk_weights.to(torch.float32).contiguous())
