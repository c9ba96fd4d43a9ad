"""The ladder: every rung a verified run, one switch apart from the one before."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from epdecode.bench.command import app
from epdecode.bench.ladder import RUNGS, Step, overrides_of, table


def test_each_rung_turns_one_switch() -> None:
    for index in range(1, len(RUNGS)):
        changed = set(overrides_of(index, graphs=False)) ^ set(
            overrides_of(index - 1, graphs=False)
        )
        assert changed == {*RUNGS[index].on, *RUNGS[index].off}
    assert "graph.enabled=true" in overrides_of(0, graphs=True)
    assert "graph.enabled=false" in overrides_of(0, graphs=False)


def test_the_rungs_that_a_cpu_can_take_are_run_and_verified(tmp_path: Path) -> None:
    quick = ["run.steps=2", "run.warmup_steps=1"]
    done = CliRunner().invoke(
        app, ["ladder", "-c", "cpu-tiny", "--json", "--out", str(tmp_path), *quick]
    )
    assert done.exit_code == 0, done.output
    rungs = json.loads(done.stdout)["rungs"]
    assert [rung["status"] for rung in rungs[:4]] == ["passed"] * 4
    assert rungs[0]["speed_up"] == 1
    assert all(rung["layer_us"] > 0 for rung in rungs[:4])
    assert all(Path(rung["result"]).exists() for rung in rungs[:4])
    assert rungs[1]["moved"] is not None
    assert "not here: graph.enabled: torch_a2a" in rungs[4]["status"]
    assert rungs[4]["layer_us"] is None


def test_a_config_that_cannot_run_at_all_fails_with_the_reason(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["ladder", "-c", "cpu-tiny", "--out", str(tmp_path), "parallel.ep=7", "--json"]
    )
    assert done.exit_code == 2
    assert "parallel.ep: got 7" in done.output


def test_the_table_shows_what_there_is() -> None:
    steps = [Step("a", (), "passed", 100.0, 1.0), Step("b", (), "not here: why")]
    assert table(steps).row_count == 2
