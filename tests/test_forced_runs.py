"""Whole runs with forced routes: verified whatever the routing, the placement and the layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from epdecode.build import build
from epdecode.expert_load import gather_load
from epdecode.graphs import StepBatch, fill
from epdecode.inputs import Planned, make_batches
from epdecode.plan import make_plan
from epdecode.routing.load import read_recorded
from epdecode.sources import open_sources
from epdecode.verify import verify_step
from epdecode.world import World
from tests.ranks import run_ranks
from tests.small import small_config, small_model

BALANCED = ["experts.placement=balanced", "experts.redundant=8"]
KINDS = ["uniform", "balanced", "zipf", "lognormal", "hot_rank", "hot_expert", "stress"]


def verified(world: World, overrides: list[str]) -> tuple[bool, list[list[int]]]:
    """The verdict over all batches, and each layer's rows per local slot in the first one."""
    config, model = small_config(*overrides), small_model()
    recorded = read_recorded(config)
    plan = make_plan(config, model, world.size, recorded=recorded)
    sources = open_sources(config, model, plan, recorded)
    runtime = build(config, plan, world, sources)
    batches = make_batches(config, plan, world, sources.recorded)
    step = runtime.step()
    result = verify_step(runtime, step, batches)
    fill(step.inputs, batches[0].batch, batches[0].bucket)
    counts = [trace.counts.tolist() for trace in step(batches[0].bucket).traces]
    runtime.close()
    return result.passed, counts


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_replicas(kind: str) -> None:
    for passed, _ in run_ranks(4, verified, [f"routing.kind={kind}", "run.steps=2", *BALANCED]):
        assert passed


@pytest.mark.parametrize("layout", ["masked", "packed"])
def test_the_gate_with_replicas(layout: str) -> None:
    overrides = [f"transport.layout={layout}", "run.steps=2", *BALANCED]
    for passed, _ in run_ranks(2, verified, overrides):
        assert passed


def trace_of(path: Path, ids: np.ndarray) -> list[str]:
    np.save(path, ids)
    return ["routing.kind=trace", f"routing.path={path}", "routing.wrap=true"]


def test_every_token_to_two_experts_of_one_rank(tmp_path: Path) -> None:
    """Nothing is dropped: 64 rows each, the capacity."""
    ids = np.tile(np.array([0, 1], dtype=np.int8), (16, 2, 1))
    overrides = [*trace_of(tmp_path / "t.npy", ids), "run.steps=1", "batch.vary=false"]
    results = run_ranks(4, verified, overrides)
    assert all(passed for passed, _ in results)
    counts = [layers[0] for _, layers in results]
    assert counts == [[64, 64], [0, 0], [0, 0], [0, 0]]


def test_replicas_spread_what_one_rank_would_get(tmp_path: Path) -> None:
    """The same trace with every expert on every rank: each computes a quarter."""
    ids = np.tile(np.array([0, 1], dtype=np.int8), (16, 2, 1))
    overrides = [
        *trace_of(tmp_path / "t.npy", ids),
        "run.steps=1", "batch.vary=false", "experts.placement=balanced", "experts.redundant=24",
    ]  # fmt: skip
    results = run_ranks(4, verified, overrides)
    assert all(passed for passed, _ in results)
    assert [sum(layers[0]) for _, layers in results] == [32, 32, 32, 32]


def test_a_trace_with_absent_experts_and_tokens_without_any(tmp_path: Path) -> None:
    ids = np.tile(np.array([5, -1], dtype=np.int16), (8, 2, 1))
    ids[::2] = -1
    overrides = [*trace_of(tmp_path / "t.npy", ids), "run.steps=3"]
    for placement in ([], BALANCED):
        results = run_ranks(4, verified, [*overrides, *placement])
        assert all(passed for passed, _ in results)


def alternating(world: World, path: str) -> tuple[bool, float]:
    """20 steps of 7 and 0, then 1 and 16 tokens; the share of rows that expert 5 got."""
    config = small_config("routing.kind=trace", f"routing.path={path}", "routing.wrap=true")
    model = small_model(num_shared_experts=0)
    recorded = read_recorded(config)
    plan = make_plan(config, model, world.size, recorded=recorded)
    runtime = build(config, plan, world)
    step, batches, counts = runtime.step(), [], []
    for index in range(20):
        tokens = ((7, 0), (1, 16))[index % 2]
        mine = tokens[world.rank]
        hidden = torch.randn(mine, model.hidden).to(torch.bfloat16)
        ids = torch.tensor([[5, -1], [-1, -1]])[torch.arange(mine) % 2]
        route = (ids, torch.full(ids.shape, 0.5).masked_fill(ids < 0, torch.nan))
        planned = Planned(16, StepBatch(hidden, (route, route)), tokens)
        batches.append(planned)
        fill(step.inputs, planned.batch, 16)
        output = step(16)
        counts += [trace.counts.clone() for trace in output.traces]
        nobody = output.traces[0].out[:mine][ids[:, 0] < 0]
        assert (nobody == 0).all(), "a token without experts gets exactly nothing"
    passed = verify_step(runtime, step, batches).passed
    load = gather_load(plan, world, counts)
    runtime.close()
    return passed, load.summary.max


def test_idle_and_uneven_ranks_alternate(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.zeros((1, 2, 2), dtype=np.int8) + np.array([0, 1], np.int8))
    for passed, most in run_ranks(2, alternating, str(tmp_path / "t.npy")):
        assert passed
        assert most == (4 + 9) / 2
