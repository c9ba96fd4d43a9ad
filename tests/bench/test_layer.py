"""The layer over batch sizes: each a verified run, with its own graph and floor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epdecode.bench.command import app
from epdecode.bench.layer import Line, parse_tokens, table
from epdecode.errors import ConfigError


def invoke(*words: str):
    return CliRunner().invoke(app, ["layer", "-c", "cpu-tiny", *words])


def test_each_size_is_run_and_verified(tmp_path: Path) -> None:
    quick = ["--tokens", "1,4", "--out", str(tmp_path), "run.steps=2", "run.warmup_steps=1"]
    done = invoke("--json", *quick)
    assert done.exit_code == 0, done.output
    lines = json.loads(done.stdout)["lines"]
    assert [line["tokens"] for line in lines] == [1, 4]
    assert [line["status"] for line in lines] == ["passed"] * 2
    for line in lines:
        result = json.loads(Path(line["result"]).read_text())
        assert line["layer_us"] == result["timing"]["layer"]["p50"] > 0
        assert result["method"]["tokens_per_rank"] == line["tokens"]


def test_a_config_that_cannot_run_fails_with_the_reason(tmp_path: Path) -> None:
    done = invoke("--json", "--tokens", "1", "--out", str(tmp_path), "parallel.ep=7")
    assert done.exit_code == 2
    assert "parallel.ep: got 7" in done.output


@pytest.mark.parametrize("text", ["", "8,", "0", "-1", "1.5", "a"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tokens: got"):
        parse_tokens(text)


def test_the_table_shows_what_there_is() -> None:
    lines = [Line(8, "passed", 10.0, 5.0, 0.5, 0.01), Line(16, "not here: why")]
    assert table(lines).row_count == 2
