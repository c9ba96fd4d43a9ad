"""CUDA graphs over the real transport: replay equals eager, in any order of buckets."""

from __future__ import annotations

import pytest
import torch

from epdecode.build import build
from epdecode.config.load import load_config, load_model
from epdecode.graphs import StepBatch, fill
from epdecode.inputs import Planned, make_batches
from epdecode.plan import make_plan
from epdecode.verify import verify_step
from epdecode.warmup import compile_all, warm_up
from epdecode.world import World
from tests.ranks import run_ranks

ORDER = [8, 1, 4, 1, 2, 8]
OVERRIDES = [
    "parallel.stand_in_ep=8",
    "layers=2",
    "transport.max_tokens_per_rank=128",
    "batch.buckets=[1,2,4,8]",
    "batch.tokens_per_rank=8",
    "run.steps=2",
]


def replay(world: World, experts: str, rounds: int) -> tuple[int, float, bool]:
    """Differing replays, the worst difference, and whether the numbers are right at the end."""
    config = load_config("deepseek_v3-h200-deepep_ll", [*OVERRIDES, f"experts.name={experts}"])
    plan = make_plan(config, load_model(config.model), world.size, ranks_per_gpu=world.size)
    runtime = build(config, plan, world)
    compile_all(runtime)
    world.barrier()
    eager = runtime.eager()
    warm_up(runtime, eager, make_batches(config, plan, world), 2)
    step = runtime.step()
    world.barrier()
    differing, worst = 0, 0.0
    gen = torch.Generator(world.device).manual_seed(world.rank)
    for index, bucket in enumerate(ORDER * rounds):
        tokens = bucket if world.rank == 0 else index % (bucket + 1)
        hidden = torch.randn(tokens, plan.model.hidden, device=world.device, generator=gen).to(
            torch.bfloat16
        )
        fill(runtime.inputs, StepBatch(hidden), bucket)
        replayed = step(bucket).hidden[:tokens].clone()
        launched = eager(bucket).hidden[:tokens].clone()
        torch.cuda.synchronize()
        difference = (replayed.float() - launched.float()).norm() / launched.float().norm()
        if tokens and not difference <= 1e-2:
            differing += 1
        worst = max(worst, float(difference) if tokens else 0.0)
    planned = Planned(8, StepBatch(hidden[:8]), (hidden.shape[0],) * world.size)
    right = verify_step(runtime, step, [planned]).passed
    runtime.close()
    return differing, worst, right


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("experts", ["deepgemm", "triton_gemm"])
@pytest.mark.parametrize("size", [1, 2])
def test_replays_in_any_order_equal_eager_steps(size: int, experts: str) -> None:
    rounds = 50 if size == 1 else 4
    for differing, worst, right in run_ranks(size, replay, experts, rounds, cuda=True, timeout=240):
        assert differing == 0, worst
        assert right
