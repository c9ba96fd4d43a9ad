"""Non-finite values are counted by stage, and the first is named; padding never counts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from epdecode.build import build
from epdecode.errors import Exit
from epdecode.inputs import make_batches
from epdecode.loop import timed_steps
from epdecode.plan import make_plan
from epdecode.result import NonFinite
from epdecode.result.document import exit_of, from_json
from epdecode.world import World
from tests.documents import make_result
from tests.ranks import run_ranks
from tests.small import small_config, small_model

STEPS = 4


def counted(world: World, overrides: list[str], fault: str) -> NonFinite:
    always = ["debug.non_finite=true", "batch.vary=false", "batch.tokens_per_rank=5"]
    config, model = small_config(*always, "run.steps=4", *overrides), small_model()
    plan = make_plan(config, model, world.size)
    runtime = build(config, plan, world)
    batches = make_batches(config, plan, world, runtime.recorded)
    runtime.inputs.hidden.fill_(torch.nan)
    if fault == "row" and world.rank == 1:
        batches[2].batch.hidden[3, 7] = torch.nan
    if fault == "weights" and world.rank == 1:
        runtime.weights[1].experts.down.scales[1] = torch.nan
    timed_steps(runtime, runtime.eager(), batches, lambda: range(STEPS), lambda *note: None)
    assert runtime.tally is not None
    found = runtime.tally.gather(world, plan.num_local_experts)
    runtime.close()
    return found


@pytest.mark.parametrize("wire", ["fp8", "bf16"])
@pytest.mark.parametrize("layout", ["masked", "packed"])
def test_a_bad_row_is_followed_through_its_layer_and_stays_alone(wire: str, layout: str) -> None:
    overrides = [f"transport.wire={wire}", f"transport.layout={layout}", "routing.kind=uniform"]
    for found in run_ranks(2, counted, overrides, "row"):
        assert (found.first_rank, found.first_step, found.first_stage) == (1, 2, "route")
        # Two layers, top-2: nothing but this one row, its copies, and what comes back.
        assert found.counts == {"route": 2, "dispatch_wait": 4, "down_gemm": 4, "combine_wait": 2}


def test_a_row_that_the_gate_sends_nowhere_is_counted_all_the_same() -> None:
    for found in run_ranks(2, counted, [], "row"):
        assert (found.first_rank, found.first_step, found.first_stage) == (1, 2, "route")
        assert found.counts == {"route": 2, "dispatch_wait": 0, "down_gemm": 0, "combine_wait": 0}


def test_bad_weights_are_named_by_their_global_expert() -> None:
    for found in run_ranks(2, counted, [], "weights"):
        assert (found.first_rank, found.first_stage, found.first_expert) == (1, "down_gemm", 5)
        assert found.counts["route"] == found.counts["dispatch_wait"] == 0
        assert found.counts["down_gemm"] > 0


def test_a_clean_run_counts_nothing_though_padding_holds_nan() -> None:
    (found,) = run_ranks(1, counted, [], "none")
    assert set(found.counts.values()) == {0}
    assert found.first_rank is None


def test_non_finite_values_have_their_own_exit_code() -> None:
    result = make_result()
    clean = NonFinite(counts={"route": 0})
    assert exit_of(replace(result, non_finite=clean)) == exit_of(result)
    bad = replace(result, non_finite=NonFinite(counts={"route": 1}), status="failed")
    assert exit_of(bad) == Exit.NON_FINITE


def test_the_job_counts_when_asked(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "epdecode.run", "--out", str(tmp_path), "run.steps=2"]
    done = subprocess.run(
        [*command, "debug.non_finite=true"], capture_output=True, text=True, check=False
    )
    line = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, line["status"]) == (0, "passed")
    result = from_json(Path(line["result"]).read_text())
    assert result.non_finite is not None
    assert set(result.non_finite.counts.values()) == {0}
