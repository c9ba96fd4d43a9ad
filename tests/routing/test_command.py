"""``epdecode routing inspect`` and what ``epdecode plan`` says of placements."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from epdecode import cli
from epdecode.config.load import load_config
from epdecode.models import ModelShape
from epdecode.plan import Plan, make_plan
from epdecode.plan.placement_study import study, usual_counts
from epdecode.routing.command import BARS, picture
from tests.small import small_model


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["epdecode", *args])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two layers of eight experts, top-2: even, and one where every token takes expert 0."""
    ids = np.zeros((28, 2, 2), dtype=np.int16)
    ids[:, 0] = (np.arange(28)[:, None] * 2 + np.arange(2)) % 8
    ids[:, 1, 1] = 1 + np.arange(28) % 7
    np.save(tmp_path / "t.npy", ids)
    return str(tmp_path / "t.npy")


def test_imbalance_per_layer_as_json(monkeypatch, capsys, trace: str):
    args = ("routing", "inspect", trace, "--ep", "4", "--redundant", "0", "--redundant", "4")
    assert run(monkeypatch, *args, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_experts"], found["redundant"]) == (8, [0, 4])
    even, skewed = found["layers"]
    assert even["imbalance"] == even["rank_imbalance"] == 1.0
    assert (skewed["choices"], skewed["experts_hit"]) == (56, 8)
    assert skewed["imbalance"] == pytest.approx(28 / 7)
    assert skewed["rank_imbalance"] == pytest.approx(32 / 14)
    assert skewed["balanced"] == pytest.approx([32 / 14, 1.0], abs=0.15)


def test_the_table_has_a_line_a_layer_and_a_picture(monkeypatch, capsys, trace: str):
    assert run(monkeypatch, "routing", "inspect", trace, "--ep", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 layers, 8 experts; ep = 2" in lines[0]
    assert lines[3].endswith("████████")
    assert lines[4].endswith("█▂▂▂▂▂▂▂")
    assert lines[5].startswith(" mean")


def test_the_model_says_how_many_experts_there_are(monkeypatch, capsys, trace: str):
    assert run(monkeypatch, "routing", "inspect", trace, "--model", "deepseek-v3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_experts"] == 256


def test_a_load_table_is_inspected_the_same_way(monkeypatch, capsys, tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("layer,expert,count\n0,0,30\n0,1,10\n", encoding="utf-8")
    args = ("routing", "inspect", str(path), "--ep", "2", "--model", "tiny", "--json")
    assert run(monkeypatch, *args) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert layer["rank_imbalance"] == 2.0
    assert layer["experts_hit"] == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere.npy",), "nowhere.npy: no such file"),
        (("{trace}", "--redundant", "3", "--ep", "4"), "8 experts + 3 replicas on 4 rank(s)"),
        (("{csv}", "--model", "tiny"), "2 experts; tiny has 8"),
    ],
)
def test_what_cannot_be_inspected_is_one_line_and_code_2(
    monkeypatch, capsys, tmp_path: Path, trace: str, args: tuple[str, ...], message: str
):
    (tmp_path / "t.csv").write_text("1,2\n", encoding="utf-8")
    named = [one.format(trace=trace, csv=tmp_path / "t.csv") for one in args]
    assert run(monkeypatch, "routing", "inspect", *named) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_bars_stand_for_the_busiest_of_their_experts():
    assert picture([0, 1, 8]) == BARS[0] + BARS[1] + BARS[8]
    wide = picture([1.0] * 128 + [2.0] + [1.0] * 127)
    assert len(wide) == 64
    assert wide.count(BARS[8]) == 1
    assert picture([0.0, 0.0]) == "  "


def plan_for(world_size: int) -> object:
    def made(config: object) -> Plan:
        return make_plan(config, big(), world_size)

    return made


def big() -> ModelShape:
    return small_model(hidden=2048, num_experts=64, num_shared_experts=0)


def test_a_study_shows_imbalance_buffer_and_memory_of_each_number():
    config = load_config(
        None,
        [
            "transport.name=deepep_ll",
            "routing.kind=lognormal",
            "routing.sigma=2",
            "hardware.device=h200",
        ],
    )
    contiguous, none, some, wrong = study(config, plan_for(8), [0, 16, 3])
    assert (contiguous.placement, none.placement, some.redundant) == ("contiguous", "balanced", 16)
    assert contiguous.rank_imbalance > none.rank_imbalance >= some.rank_imbalance >= 1
    assert (none.num_qps, some.num_qps) == (8, 10)
    assert none.buffer_bytes < some.buffer_bytes
    assert none.memory_bytes < some.memory_bytes
    assert "8 rank(s)" in wrong.refused
    assert wrong.rank_imbalance is None


def test_usual_counts_are_those_that_are_possible():
    assert usual_counts(256, 8, 32) == [0, 8, 16, 32]
    assert usual_counts(8, 2, 0) == [0, 2, 4, 8]
    assert usual_counts(8, 1, 0) == [0]


def test_plan_compares_placements_for_a_trace(monkeypatch, capsys, trace: str):
    args = ("plan", "-n", "2", "routing.kind=trace", f"routing.path={trace}")
    assert run(monkeypatch, *args, "--redundant", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [choice["redundant"] for choice in document["placements"]] == [0, 2]
    assert document["placement"]["load"] == trace
    assert document["placement"]["rank_imbalance"] == pytest.approx((1 + 10 / 7) / 2)
    assert run(monkeypatch, *args) == 0
    out = capsys.readouterr().out
    assert f"imbalance   of ranks: contiguous 1.214 ({trace})" in out
    assert f"placements, for the load of {trace}" in out


def test_plan_says_nothing_of_placements_when_load_is_even(monkeypatch, capsys):
    assert run(monkeypatch, "plan") == 0
    assert "placements" not in capsys.readouterr().out
