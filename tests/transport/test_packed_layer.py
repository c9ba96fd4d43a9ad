"""The whole layer on packed rows: the masked path's numbers for any world size, verified."""

from __future__ import annotations

import pytest
import torch

from epdecode.build import build
from epdecode.graphs import StepBatch, fill
from epdecode.inputs import make_batches
from epdecode.plan import make_plan
from epdecode.verify import row_errors, verify_step
from epdecode.warmup import compile_all
from epdecode.world import World
from tests.ranks import run_ranks
from tests.small import small_config, small_model
from tests.test_layer import one_batch

AGREE = 2**-6
"""A layer's output rows: one rounding to bfloat16 more per rank that holds experts of a token."""


@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_packed_agrees_with_masked_for_any_world_size(wire: str) -> None:
    shared = ["layers=1", f"transport.wire={wire}"]
    masked = torch.cat(run_ranks(1, one_batch, shared))
    packed = [*shared, "transport.layout=packed"]
    for size in (1, 2, 4):
        together = torch.cat(run_ranks(size, one_batch, packed))
        assert (row_errors(together, masked) <= AGREE).all()


def test_worst_case_rows_and_reducing_apart_change_nothing() -> None:
    packed = ["layers=1", "transport.layout=packed"]
    exact = torch.cat(run_ranks(2, one_batch, packed))
    worst = torch.cat(run_ranks(2, one_batch, [*packed, "transport.worst_case_rows=true"]))
    apart = torch.cat(run_ranks(2, one_batch, [*packed, "transport.fused_reduce=false"]))
    torch.testing.assert_close(worst, exact, rtol=0, atol=0)
    torch.testing.assert_close(apart, exact, rtol=2**-7, atol=2**-10)


def run_batches(world: World, overrides: list[str]) -> tuple[bool, int]:
    config, model = small_config("transport.layout=packed", *overrides), small_model()
    plan = make_plan(config, model, world.size)
    runtime = build(config, plan, world)
    compile_all(runtime)
    batches = make_batches(config, plan, world)
    verification = verify_step(runtime, runtime.eager(), batches)
    runtime.close()
    return verification.passed, verification.rows


@pytest.mark.parametrize("kind", ["model", "uniform", "balanced", "stress"])
@pytest.mark.parametrize("worst_case", ["true", "false"])
def test_every_routing_is_verified(kind: str, worst_case: str) -> None:
    overrides = [
        f"routing.kind={kind}",
        f"transport.worst_case_rows={worst_case}",
        "run.steps=3",
    ]
    for passed, rows in run_ranks(2, run_batches, overrides):
        assert passed
        assert rows > 0


def poisoned(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """The same batch with clean and with NaN workspaces, padded rows and tail."""
    config = small_config("transport.layout=packed", "transport.worst_case_rows=true")
    model = small_model()
    runtime = build(config, make_plan(config, model, world.size), world)
    hidden = torch.randn(3, model.hidden).to(torch.bfloat16)
    step, outputs = runtime.eager(), []
    for poison in (0.0, torch.nan):
        packer = runtime.transport._packer
        packer._rows.data.copy_(torch.full(packer._rows.data.shape, poison))
        packer._rows.scales.fill_(poison)
        packer._sums.fill_(poison)
        runtime.experts._out.fill_(poison)
        fill(runtime.inputs, StepBatch(hidden), 16)
        runtime.inputs.hidden[3:] = poison
        outputs.append(step(16).hidden[:3].clone())
    return outputs[0], outputs[1]


def test_nan_in_padding_gaps_and_tail_reaches_nobody() -> None:
    for clean, with_nan in run_ranks(2, poisoned):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, with_nan)
