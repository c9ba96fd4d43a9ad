"""Are the numbers right? Row by row against the plain path, with the same weights and routes.

The reference shares nothing with any transport: every rank gathers all tokens and routes, runs its
own experts over them one at a time in float32 (rounding where the formats do), and the sum over
ranks is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from epdecode.batch import ExpertWeights, Route
from epdecode.build import Runtime
from epdecode.experts.reference import as_fp8_input, expert_mlp, plain_weights, select
from epdecode.graphs import Step, StepOutput, fill
from epdecode.inputs import Planned
from epdecode.kernels.fp8 import ScaleFormat
from epdecode.kernels.rms_norm import rms_norm_ref
from epdecode.plan import Plan
from epdecode.result import Verification
from epdecode.weights.seeded import LayerWeights
from epdecode.world import World

REFERENCE = (
    "plain torch: all tokens gathered, one expert at a time in float32 with the formats of the "
    "run, summed over ranks"
)
BF16_TOLERANCE = 2**-7
"""A bfloat16 step (2^-8) in the gate-up output and another in the result."""
TIES = 0.01
"""Share of tokens whose experts may differ from the plain gate's: two sums of the same products,
taken in another order, decide a near tie differently. A wrong gate differs nearly everywhere."""
ELEMENT_FACTOR = 16.0
"""One element may be off by this many tolerances of its row's root mean square."""


def tolerance(plan: Plan) -> float:
    """Largest relative row error that rounding alone explains."""
    fp8 = plan.transport.wire == "fp8" or plan.model.weight_format == "fp8_block128"
    return fp8_tolerance(plan.model.expert_size) if fp8 else BF16_TOLERANCE


def fp8_tolerance(expert_size: int) -> float:
    """Relative row error when one activation in sixteen rounds to its other neighbour.

    That is a whole e4m3 step, at most 2^-3 of the value, so sqrt(share) * 2^-3 as a row's error.
    The share that flips of ``expert_size`` activations scatters: four standard deviations are
    added. Why any flip: tensor cores keep about 14 bits when they sum FP8 products, so a bfloat16
    in front of the activation, and with it the FP8 behind, rounds the other way now and then.
    """
    share = 1 / 16 + 4 * (1 / 16 / expert_size) ** 0.5
    return float(2**-3 * share**0.5)


def row_errors(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """float32 [T]: each row's error relative to the row's own scale; infinite when not finite.

    The larger of the relative Euclidean error and, for single elements, |difference| over
    ELEMENT_FACTOR root mean squares. A row expected to be zero must be zero.
    """
    difference = out.float() - expected.float()
    norm = expected.float().norm(dim=1)
    relative = difference.norm(dim=1) / norm
    root_mean_square = norm / expected.shape[1] ** 0.5
    element = difference.abs().amax(dim=1) / (ELEMENT_FACTOR * root_mean_square)
    errors = torch.maximum(relative, element)
    exact = (norm == 0) & (out.float() == 0).all(dim=1)
    errors = torch.where(exact, torch.zeros_like(errors), errors)
    return torch.where(torch.isfinite(errors), errors, torch.full_like(errors, torch.inf))


def reference_layer(
    normed: torch.Tensor,
    route: Route,
    weights: LayerWeights,
    held: Sequence[tuple[int, int]],
    plan: Plan,
    world: World,
) -> torch.Tensor:
    """bfloat16 [T, H] that the layer must add to its input. Collective; T the same on all ranks.

    held: (local slot, logical expert) that this rank computes (Plan.first_experts): an expert with
    replicas once, so that the rows a replica computed are compared with another's weights.
    """
    scale_format = plan.experts.scale_format
    weights_fp8 = plan.model.weight_format == "fp8_block128"
    act_format = scale_format if weights_fp8 else None
    fp8_input = plan.transport.wire == "fp8" or weights_fp8
    all_rows = _gather_rows(normed, world)
    all_ids = _gather_rows(route.topk_ids, world)
    all_weights = _gather_rows(route.topk_weights, world)
    rows = as_fp8_input(all_rows.float(), scale_format if fp8_input else None)
    total = torch.zeros(rows.shape, dtype=torch.float32, device=normed.device)
    for local, expert in held:
        token, slot = torch.nonzero(all_ids == expert, as_tuple=True)
        if token.numel():
            done = _run(rows[token], weights.experts, local, act_format)
            total.index_add_(0, token, done.float() * all_weights[token, slot][:, None])
    summed = total.cpu()
    dist.all_reduce(summed, group=world.group)
    tokens = normed.shape[0]
    own = slice(world.rank * tokens, (world.rank + 1) * tokens)
    routed = summed[own].to(normed.device).to(torch.bfloat16)
    if weights.shared is None:
        return routed
    shared_rows = as_fp8_input(normed.float(), act_format)
    return routed + _run(shared_rows, weights.shared, 0, act_format)


def _run(
    rows: torch.Tensor, weights: ExpertWeights, expert: int, act_format: ScaleFormat | None
) -> torch.Tensor:
    gate_up = plain_weights(select(weights.gate_up, expert))
    down = plain_weights(select(weights.down, expert))
    return expert_mlp(rows, gate_up, down, act_format)


def _gather_rows(rows: torch.Tensor, world: World) -> torch.Tensor:
    """[world * T, ...] in rank order, moved as bytes."""
    here = rows.contiguous().cpu().view(torch.uint8)
    parts = torch.cat(world.gather(here))
    return parts.view(rows.dtype).view(-1, *rows.shape[1:]).to(rows.device)


@dataclass(frozen=True, slots=True)
class Checked:
    """One rank's step: float32 [layers * tokens] row errors, and how many routes differ."""

    errors: torch.Tensor
    routes_differing: int


def check_step(runtime: Runtime, output: StepOutput, tokens: int) -> Checked:
    """Compare every layer of one step, each given its own input. Collective.

    tokens: this rank's real rows; the padded ones are never looked at. A row's error is the largest
    of its norm's, of its expert output's and of the residual stream's behind the layer.
    """
    plan, world, traces = runtime.plan, runtime.world, output.traces
    streams = (*(trace.hidden for trace in traces[1:]), output.hidden)
    errors, differing = [], 0
    for index, (trace, weights) in enumerate(zip(traces, runtime.weights, strict=True)):
        normed = torch.empty_like(trace.hidden)
        rms_norm_ref(trace.hidden, weights.norm, plan.model.rms_norm_eps, normed)
        normed_error = row_errors(trace.normed[:tokens], normed[:tokens])
        held = plan.first_experts(world.rank, index)
        expected = reference_layer(trace.normed, trace.route, weights, held, plan, world)
        out_error = row_errors(trace.out[:tokens], expected[:tokens])
        stream_error = row_errors(streams[index][:tokens], (trace.hidden + trace.out)[:tokens])
        errors.append(torch.maximum(torch.maximum(normed_error, out_error), stream_error))
        plain = runtime.layers[index].router.plain(trace.normed, runtime.inputs.num_tokens)
        differing += _differing(trace.route, plain, tokens)
    return Checked(torch.cat(errors).cpu(), differing)


def _differing(route: Route, plain: Route, tokens: int) -> int:
    """Tokens whose experts are not the same, whatever their order."""
    chosen, expected = (one.topk_ids[:tokens].sort(1).values for one in (route, plain))
    return int((chosen != expected).any(1).sum())


def verify_step(runtime: Runtime, step: Step, batches: Sequence[Planned]) -> Verification:
    """Run the batches through the step as it was timed and compare every layer and row."""
    checked = []
    for planned in batches:
        fill(step.inputs, planned.batch, planned.bucket)
        output = step(planned.bucket)
        runtime.clock.synchronize()
        checked.append(check_step(runtime, output, planned.batch.hidden.shape[0]))
    errors = torch.cat([one.errors for one in checked])
    differing = sum(one.routes_differing for one in checked)
    return verdict(Checked(errors, differing), runtime.plan, runtime.world)


def verdict(checked: Checked, plan: Plan, world: World) -> Verification:
    """All ranks' rows together. Collective."""
    errors = checked.errors
    worst = int(errors.argmax()) if errors.numel() else -1
    error = float(errors[worst]) if worst >= 0 else 0.0
    mine = torch.tensor(
        [errors.numel(), worst, error, checked.routes_differing], dtype=torch.float64
    )
    ranks = world.gather(mine)
    worst_rank = max(range(world.size), key=lambda rank: float(ranks[rank][2]))
    worst_error = float(ranks[worst_rank][2])
    limit = tolerance(plan)
    rows = sum(int(rank[0]) for rank in ranks)
    differing = sum(int(rank[3]) for rank in ranks)
    return Verification(
        passed=rows > 0 and worst_error <= limit and differing <= math.ceil(TIES * rows),
        rows=rows,
        worst_row=int(ranks[worst_rank][1]) if rows else None,
        worst_error=worst_error if worst_error != float("inf") else None,
        tolerance=limit,
        reference=REFERENCE,
        worst_rank=worst_rank if rows else None,
        routes_differing=differing,
    )
