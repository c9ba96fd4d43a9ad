"""The layer and its loop: the same outputs for any world size, padding that reaches nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epdecode.batch import Route, no_mark
from epdecode.build import build
from epdecode.clock import HostClock
from epdecode.errors import UserError
from epdecode.graphs import EagerStep, StepBatch, choose_bucket, fill, run_layers
from epdecode.inputs import Planned, make_batches
from epdecode.models import ModelShape
from epdecode.plan import make_plan
from epdecode.verify import verify_step
from epdecode.warmup import compile_all
from epdecode.world import World
from tests.fakes import deep_ep as fake_deep_ep
from tests.ranks import run_ranks
from tests.small import ll_model, plain_router, small_config, small_model

TOKENS = 12


def one_batch(world: World, overrides: list[str], total: int = TOKENS) -> torch.Tensor:
    """``total`` tokens spread over the ranks through all layers; this rank's outputs."""
    config, model = small_config(*overrides), small_model()
    runtime = build(config, make_plan(config, model, world.size), world)
    gen = torch.Generator().manual_seed(7)
    hidden = torch.randn(total, model.hidden, generator=gen).to(torch.bfloat16)
    share = -(-total // world.size)
    mine = hidden[world.rank * share : (world.rank + 1) * share]
    fill(runtime.inputs, StepBatch(mine), 16)
    output = EagerStep(runtime.layers, runtime.inputs, runtime.clock)(16)
    runtime.close()
    return output.hidden[: mine.shape[0]].clone()


@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_one_two_and_four_ranks_give_the_same_outputs(wire: str) -> None:
    overrides = [f"transport.wire={wire}"]
    alone = torch.cat(run_ranks(1, one_batch, overrides))
    for size in (2, 4):
        together = torch.cat(run_ranks(size, one_batch, overrides))
        torch.testing.assert_close(together, alone, rtol=0, atol=0)


def poisoned(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    config, model = small_config(), small_model()
    runtime = build(config, make_plan(config, model, world.size), world)
    hidden = torch.randn(3, model.hidden).to(torch.bfloat16)
    outputs = []
    for poison in (0.0, torch.nan):
        fill(runtime.inputs, StepBatch(hidden), 16)
        runtime.inputs.hidden[3:] = poison
        output = run_layers(runtime.layers, runtime.inputs, 16, no_mark)
        outputs.append(output.hidden[:3].clone())
    return outputs[0], outputs[1]


def test_nan_in_padded_rows_reaches_nobody() -> None:
    clean, with_nan = run_ranks(1, poisoned)[0]
    assert torch.isfinite(clean).all()
    assert torch.equal(clean, with_nan)


def nan_row(world: World) -> torch.Tensor:
    config, model = small_config(), small_model()
    runtime = build(config, make_plan(config, model, world.size), world)
    hidden = torch.randn(5, model.hidden).to(torch.bfloat16)
    if world.rank == 0:
        hidden[2, 10] = torch.nan
    fill(runtime.inputs, StepBatch(hidden), 8)
    return run_layers(runtime.layers, runtime.inputs, 8, no_mark).hidden[:5].clone()


def test_nan_in_a_real_row_stays_in_that_row() -> None:
    first, second = run_ranks(2, nan_row)
    finite = torch.isfinite(first).all(dim=1)
    assert finite.tolist() == [True, True, False, True, True]
    assert torch.isfinite(second).all()


def replayed(world: World, model: ModelShape, orders: list[int]) -> list[bool]:
    """Buckets in the given order, with new inputs each time, on the fake low-latency buffer."""
    fake_deep_ep.install()
    config = small_config(
        "transport.name=deepep_ll",
        "transport.max_tokens_per_rank=8",
        "batch.tokens_per_rank=8",
        "batch.buckets=[1,2,4,8]",
        "experts.name=torch_loop",
        "graph.enabled=false",
        "hardware.device=cpu",
    )
    runtime = build(config, make_plan(config, model, world.size), world)
    compile_all(runtime)
    passed = []
    for index, bucket in enumerate(orders):
        gen = torch.Generator().manual_seed(10 * index + world.rank)
        tokens = bucket if world.rank == 0 else index % (bucket + 1)
        hidden = torch.randn(tokens, model.hidden, generator=gen).to(torch.bfloat16)
        planned = Planned(bucket, StepBatch(hidden), (tokens,) * world.size)
        passed.append(verify_step(runtime, runtime.eager(), [planned]).passed)
    runtime.close()
    return passed


def test_buckets_in_any_order_share_one_low_latency_buffer() -> None:
    model = ll_model(router=plain_router())
    orders = [8, 1, 4, 1, 2, 8] * 3
    for passed in run_ranks(2, replayed, model, orders):
        assert passed == [True] * len(orders)


def run_batches(world: World, overrides: list[str]) -> tuple[bool, int]:
    config, model = small_config(*overrides), small_model()
    plan = make_plan(config, model, world.size)
    runtime = build(config, plan, world)
    batches = make_batches(config, plan, world)
    verification = verify_step(runtime, runtime.eager(), batches)
    runtime.close()
    return verification.passed, verification.rows


@pytest.mark.parametrize("kind", ["model", "uniform", "balanced", "stress"])
@pytest.mark.parametrize("size", [1, 2])
def test_every_routing_is_verified(kind: str, size: int) -> None:
    overrides = [f"routing.kind={kind}", "run.steps=3", "batch.tokens_per_rank=16"]
    for passed, rows in run_ranks(size, run_batches, overrides):
        assert passed
        assert rows > 0


def tampered(world: World) -> bool:
    """A layer that loses one expert's weights must not pass."""
    config, model = small_config(), small_model()
    plan = make_plan(config, model, world.size)
    runtime = build(config, plan, world)
    batches = make_batches(config, plan, world)
    before = runtime.weights[0].experts.down.data[0].clone()
    step = runtime.eager()
    fill(step.inputs, batches[0].batch, batches[0].bucket)

    class Tampering:
        inputs = step.inputs

        def __call__(self, bucket: int):
            runtime.weights[0].experts.down.data[0] = 0
            output = step(bucket)
            runtime.weights[0].experts.down.data[0] = before
            return output

    return verify_step(runtime, Tampering(), batches).passed


def test_wrong_weights_do_not_pass() -> None:
    assert run_ranks(2, tampered) == [False, False]


def lost_residual(world: World) -> list[bool]:
    """Each layer in turn forgets its input as it ends; the norm behind it fits what is left."""
    config, model = small_config(), small_model()
    runtime = build(config, make_plan(config, model, world.size), world)
    batches = make_batches(config, runtime.plan, world)
    found = []
    for layer in runtime.layers:

        def end(hidden, routed, shared, right=layer.end):
            return right(torch.zeros_like(hidden), routed, shared)

        wrong = replace(layer, end=end)
        layers = [wrong if one is layer else one for one in runtime.layers]
        step = EagerStep(layers, runtime.inputs, runtime.clock)
        found.append(verify_step(runtime, step, batches).passed)
    return found


def test_a_stream_that_loses_its_residual_does_not_pass() -> None:
    assert run_ranks(1, lost_residual) == [[False, False]]


def wrong_gate(world: World) -> tuple[bool, int, int]:
    """A gate that takes the experts after the right ones."""
    config, model = small_config(), small_model()
    runtime = build(config, make_plan(config, model, world.size), world)
    batches = make_batches(config, runtime.plan, world)
    router = runtime.layers[0].router
    right = router._ops.topk

    def next_experts(logits, bias, rule, num_tokens):
        route = right(logits, bias, rule, num_tokens)
        ids = torch.where(route.topk_ids >= 0, (route.topk_ids + 1) % model.num_experts, -1)
        return Route(ids, route.topk_weights)

    router._ops = replace(router._ops, topk=next_experts)
    found = verify_step(runtime, runtime.eager(), batches)
    return found.passed, found.routes_differing, found.rows


def test_a_wrong_gate_does_not_pass_though_its_experts_are_right() -> None:
    for passed, differing, rows in run_ranks(2, wrong_gate):
        assert not passed
        assert rows // 2 - 2 <= differing <= rows // 2, "the rows of the first of two layers"


def test_bucket_choice() -> None:
    assert [choose_bucket((1, 2, 4), most) for most in (0, 1, 2, 3, 4)] == [1, 1, 2, 4, 4]
    with pytest.raises(UserError, match="a batch of 5 tokens; the largest bucket is 4"):
        choose_bucket((1, 2, 4), 5)


def test_host_clock_sums_a_stage_over_layers() -> None:
    recorder = HostClock().recorder()
    recorder.start()
    for _ in range(3):
        recorder.mark("route")
        recorder.mark("down_gemm")
    assert set(recorder.stages()) == {"route", "down_gemm"}
    assert all(us >= 0 for us in recorder.stages().values())
