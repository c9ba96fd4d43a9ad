"""Logits -> route in one kernel: scores, bias, group-limited top-k, weights, scaling; float32.

The rule, the same in kernel and plain torch: the greatest choice value wins, the lowest id on
ties. The choice value is the logit itself when score and group choice only depend on its order,
else score + bias. A row with a NaN, or whose weights would be NaN, routes nowhere: ids -1,
weights 0. Sums run in float64, where their order cannot change a float32 result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epdecode.batch import Route
from epdecode.kernels.launch import early_launch, launch_options, power_of_two
from epdecode.kernels.quant_math import LOG2_E, sigmoid, sigmoid_ref
from epdecode.kernels.router_rule import SCORINGS, check_router, chooses_by_logit
from epdecode.kernels.router_rule import RouterRule as RouterRule

LOWEST = -(1 << 63)
TINY = 1e-20
"""Added to the sum that normalises weights: all-zero scores give zero weights, not NaN."""


@triton.jit
def _order(value, id):
    """int64 that sorts by (value, lowest id first); -0.0 equals 0.0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - id).to(tl.int64)


@triton.jit
def _id_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _value_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _sum_parts(pointer, mask, stride, PARTS: tl.constexpr):
    total = tl.load(pointer, mask=mask, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(pointer + part * stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _best_groups(key, group, TOP2: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr):
    """int1 per group: is it among the KEEP best? key int64 [groups, size]."""
    LOWEST: tl.constexpr = -(1 << 63)
    first = tl.max(key, 1)
    score = _value_of(first)
    if TOP2:
        second = tl.max(tl.where(key == first[:, None], LOWEST, key), 1)
        score += tl.where(second == LOWEST, 0.0, _value_of(second))
    rank = tl.where(group < GROUPS, _order(score, group), LOWEST)
    kept = group < 0
    for _ in tl.static_range(KEEP):
        best = tl.max(rank, 0)
        kept = kept | (rank == best)
        rank = tl.where(rank == best, LOWEST, rank)
    return kept


@triton.jit
def _router_kernel(  # noqa: C901
    logits,
    bias,
    num_tokens,
    topk_ids,
    topk_weights,
    row_stride,
    part_stride,
    factor,
    PARTS: tl.constexpr,
    SCORING: tl.constexpr,
    CHOOSE_LOGIT: tl.constexpr,
    BIAS: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_LANES: tl.constexpr,
    KEEP: tl.constexpr,
    TOP2: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    LOWEST: tl.constexpr = -(1 << 63)
    LOG2_E: tl.constexpr = 1.4426950408889634
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUP_LANES)
    lane = tl.arange(0, SIZE_LANES)
    id = group[:, None] * SIZE + lane[None, :]
    real = (group < GROUPS)[:, None] & (lane < SIZE)[None, :]
    row = logits + token * row_stride
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logit = _sum_parts(row + id, real, part_stride, PARTS)
    highest = tl.max(tl.max(logit, 1), 0)
    total = tl.zeros((), tl.float64)
    if SCORING == 0:
        part = tl.exp2((logit - highest) * LOG2_E)
        total = tl.sum(tl.sum(part.to(tl.float64), 1), 0)
    if CHOOSE_LOGIT:
        choice = logit
    elif SCORING == 0:
        choice = tl.div_rn(part, total.to(tl.float32))
    else:
        choice = sigmoid(logit)
    if BIAS:
        choice += tl.load(bias + id, mask=real, other=0.0)
    wrong = tl.max(tl.max((real & (choice != choice)).to(tl.int32), 1), 0)
    key = tl.where(real, _order(choice, id), LOWEST)
    if GROUPS > 1:
        key = tl.where(_best_groups(key, group, TOP2, GROUPS, KEEP)[:, None], key, LOWEST)

    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int64)
    for k in tl.static_range(K):
        best = tl.max(tl.max(key, 1), 0)
        chosen = tl.where(slot == k, _id_of(best), chosen)
        key = tl.where(key == best, LOWEST, key)

    used = slot < K
    logit = _sum_parts(row + chosen, used, part_stride, PARTS)
    if SCORING == 1:
        weight = sigmoid(logit)
    else:
        if SCORING == 2:
            highest = tl.max(logit, 0)
            total = tl.sum(tl.exp2((logit - highest) * LOG2_E).to(tl.float64), 0)
        weight = tl.div_rn(tl.exp2((logit - highest) * LOG2_E), total.to(tl.float32))
    if NORM:
        sum = tl.sum(tl.where(used, weight, 0.0).to(tl.float64), 0).to(tl.float32)
        weight = tl.div_rn(weight, sum + 1e-20)
    weight = weight * factor
    wrong |= tl.max((used & (weight != weight)).to(tl.int32), 0)
    good = (wrong == 0) & (token < tl.load(num_tokens))
    tl.store(topk_ids + token * K + slot, tl.where(good, chosen, -1), mask=used)
    tl.store(topk_weights + token * K + slot, tl.where(good, weight, 0.0), mask=used)


def router(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    rule: RouterRule,
    num_tokens: torch.Tensor,
    out: Route | None = None,
) -> Route:
    """logits float [T, experts] -> topk_ids int64 [T, K], topk_weights float32 [T, K].

    logits may come in parts [parts, T, experts] (gate_logits), which are added in order. bias:
    float32 [experts], added for the choice only. num_tokens: int32 [1] on the device; rows from
    there on get ids -1 and weights 0, so a captured graph serves every smaller batch.
    """
    check_router(logits, bias, rule, num_tokens)
    out = _empty(logits, rule) if out is None else out
    tokens, experts = logits.shape[-2:]
    if tokens == 0:
        return out
    size = experts // rule.n_group
    _router_kernel[(tokens,)](
        logits,
        logits if bias is None else bias,
        num_tokens,
        out.topk_ids,
        out.topk_weights,
        logits.stride(-2),
        logits.stride(0),
        float(rule.routed_scaling_factor),
        PARTS=logits.shape[0] if logits.dim() == 3 else 1,
        SCORING=SCORINGS.index(rule.scoring),
        CHOOSE_LOGIT=chooses_by_logit(rule, bias),
        BIAS=bias is not None,
        K=rule.top_k,
        SLOTS=power_of_two(rule.top_k),
        GROUPS=rule.n_group,
        GROUP_LANES=power_of_two(rule.n_group),
        SIZE=size,
        SIZE_LANES=power_of_two(size),
        KEEP=rule.topk_group,
        TOP2=rule.group_score == "top2_sum",
        NORM=rule.norm_topk_prob and rule.scoring != "softmax_after_topk",
        PDL=early_launch(logits.device),
        num_warps=1,
        **launch_options(logits.device),
        # score + bias as one fused multiply-add would round differently from plain torch.
        enable_fp_fusion=False,
    )
    return out


def _empty(logits: torch.Tensor, rule: RouterRule) -> Route:
    shape = (logits.shape[-2], rule.top_k)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    return Route(ids, torch.empty(shape, dtype=torch.float32, device=logits.device))


def _order_ref(value: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 that sorts by (value, lowest id first); -0.0 equals 0.0."""
    bits = (value + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | (0x7FFFFFFF - ids)


def _choice_ref(logits: torch.Tensor, bias: torch.Tensor | None, rule: RouterRule) -> torch.Tensor:
    if chooses_by_logit(rule, bias):
        choice = logits
    elif rule.scoring == "sigmoid":
        choice = sigmoid_ref(logits)
    else:
        part = torch.exp2((logits - logits.amax(1, keepdim=True)) * LOG2_E)
        choice = part / part.double().sum(1, keepdim=True).float()
    return choice if bias is None else choice + bias


def _keep_groups_ref(key: torch.Tensor, choice: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    """key [T, experts] with the experts of all but the best groups set to the lowest key."""
    grouped = key.unflatten(1, (rule.n_group, -1))
    picked = 2 if rule.group_score == "top2_sum" and grouped.shape[2] > 1 else 1
    top = grouped.topk(picked, dim=2).indices
    score = choice.unflatten(1, (rule.n_group, -1)).gather(2, top)
    score = score[..., 0] if picked == 1 else score[..., 0] + score[..., 1]
    rank = _order_ref(score, torch.arange(rule.n_group, device=key.device))
    kept = torch.zeros_like(rank, dtype=torch.bool)
    kept.scatter_(1, rank.topk(rule.topk_group, dim=1).indices, True)
    return torch.where(kept[..., None], grouped, LOWEST).flatten(1)


def router_ref(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    rule: RouterRule,
    num_tokens: torch.Tensor,
    out: Route | None = None,
) -> Route:
    """``router`` in plain torch; the same ids, on CUDA the same bits of the weights."""
    check_router(logits, bias, rule, num_tokens)
    out = _empty(logits, rule) if out is None else out
    logits = _added(logits.float())
    ids = torch.arange(logits.shape[1], device=logits.device)
    choice = _choice_ref(logits, bias, rule)
    key = _order_ref(choice, ids)
    if rule.n_group > 1:
        key = _keep_groups_ref(key, choice, rule)
    chosen = key.topk(rule.top_k, dim=1).indices
    weights = _weights_ref(logits, chosen, rule)
    wrong = choice.isnan().any(1) | weights.isnan().any(1)
    tokens = torch.arange(logits.shape[0], device=logits.device)
    good = (~wrong & (tokens < num_tokens))[:, None]
    out.topk_ids.copy_(torch.where(good, chosen, -1))
    out.topk_weights.copy_(torch.where(good, weights, 0.0))
    return out


def _added(logits: torch.Tensor) -> torch.Tensor:
    """The parts of the logits summed one by one, as the kernel does."""
    if logits.dim() == 2:
        return logits
    total = logits[0]
    for part in logits[1:]:
        total = total + part
    return total


def _weights_ref(logits: torch.Tensor, chosen: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    picked = logits.gather(1, chosen)
    if rule.scoring == "sigmoid":
        weights = sigmoid_ref(picked)
    else:
        over = picked if rule.scoring == "softmax_after_topk" else logits
        highest = over.amax(1, keepdim=True)
        total = torch.exp2((over - highest) * LOG2_E).double().sum(1, keepdim=True).float()
        weights = torch.exp2((picked - highest) * LOG2_E) / total
    if rule.norm_topk_prob and rule.scoring != "softmax_after_topk":
        weights = weights / (weights.double().sum(1, keepdim=True).float() + TINY)
    return weights * rule.routed_scaling_factor
