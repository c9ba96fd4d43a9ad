"""`epdecode bench experts`: cases, loads, refusals, reports; timing itself needs a GPU."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
import typer
from typer.testing import CliRunner

from epdecode.bench import expert_run, experts, timing
from epdecode.bench.expert_cases import LOADS, ExpertCase, error_of, make_inputs, untouched
from epdecode.bench.expert_report import Line, document, print_table
from epdecode.bench.expert_run import candidates
from epdecode.errors import ConfigError, EnvironmentFault
from epdecode.experts.reference import expert_mlp, plain, plain_weights, select
from epdecode.plan.expert_choice import Choice, ExpertShape

SHAPE = ExpertShape(experts=4, hidden=256, size=128)


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(experts.experts)
    return partial(CliRunner().invoke, app)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,2,3"], "accepted: E,rows,H,I"),
        (["--shape", "4,0,256,128"], "accepted: E,rows,H,I"),
        (["--shape", "4,2,250,128"], "multiples of 128"),
        (["--load", "odd"], "accepted: even, uniform, skew"),
        (["--model", "tiny", "--ep", "7"], "a divisor of"),
    ],
)
def test_refusals(run, arguments, message):
    result = run(arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_without_a_gpu_it_says_so(run, monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    assert isinstance(run([]).exception, EnvironmentFault)


@pytest.mark.parametrize("load", LOADS)
def test_loads_keep_the_mean_and_differ_in_spread(load):
    counts = ExpertCase(ExpertShape(experts=32, hidden=256, size=128), 16, load).counts()
    assert sum(counts) == 32 * 16
    assert (max(counts) == 16) is (load == "even")
    assert (counts.count(0) >= 16) is (load == "skew")


def test_the_floor_counts_experts_that_got_rows():
    case = ExpertCase(SHAPE, 2, "skew")
    hit = sum(count > 0 for count in case.counts())
    assert case.floor_bytes() == hit * 3 * 256 * 128


def fill_right(inputs):
    """The plain expert's rows in ``out``, NaN past the counts."""
    inputs.out.fill_(torch.nan)
    weights = inputs.layers[0]
    for expert, count in enumerate(inputs.counts.tolist()):
        inputs.out[expert, :count] = expert_mlp(
            plain(inputs.x)[expert, :count],
            plain_weights(select(weights.gate_up, expert)),
            plain_weights(select(weights.down, expert)),
            "fp32",
        )


@pytest.mark.parametrize("load", LOADS)
def test_the_check_accepts_the_right_rows_and_nothing_else(load):
    inputs = make_inputs(ExpertCase(SHAPE, 3, load), 1, torch.device("cpu"))
    fill_right(inputs)
    assert error_of(inputs) < 0.02
    assert untouched(inputs)
    busiest = int(inputs.counts.argmax())
    inputs.out[busiest, 0] *= 2
    assert 0.02 < error_of(inputs) < math.inf
    inputs.out[busiest, 0, 0] = torch.nan
    assert error_of(inputs) == math.inf


@pytest.mark.parametrize(("backend", "correct"), [("triton_gemm", False), ("deepgemm", True)])
def test_only_ours_must_leave_rows_past_a_count_alone(monkeypatch, backend, correct):
    case = ExpertCase(SHAPE, 3)
    inputs = make_inputs(case, 1, torch.device("cpu"))
    monkeypatch.setattr(expert_run, "_time", lambda layer: 20.0)

    def measured(past):
        def layer(index):
            fill_right(inputs)
            if past:
                inputs.out[0, -1] = 0

        return expert_run._measure(case, backend, inputs, layer, 10.0)

    assert measured(past=False).correct
    assert untouched(inputs)
    line = measured(past=True)
    assert not untouched(inputs)
    assert error_of(inputs) < 0.02
    assert line.correct is correct
    assert line.note == ("" if correct else "wrong: rows past a count were written")


@pytest.mark.parametrize("rows", [1, 16, 64, 128])
def test_candidates_are_distinct_and_start_with_the_rule(rows):
    found = list(candidates(ExpertCase(ExpertShape(experts=8, hidden=7168, size=2048), rows)))
    assert len(found) == len(set(found)) > 1


def test_reports(capsys, monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "get_device_name", lambda: "a GPU")
    right = Line(
        experts=4, rows=2, hidden=256, size=128, load="even", backend="triton_gemm", correct=True,
        choice=Choice(), error=0.004, floor_us=10.0, us=12.5, share=0.8,
    )  # fmt: skip
    wrong = Line(
        experts=4, rows=2, hidden=256, size=128, load="even", backend="deepgemm", correct=False,
        note="wrong: inf",
    )  # fmt: skip
    streams = timing.Streams(4.36, 4.23)
    made = json.loads(json.dumps(document([right, wrong], streams), allow_nan=False))
    assert made["lines"][0]["choice"]["tokens"] == 16
    assert made["lines"][1]["us"] is None
    print_table([right, wrong], streams)
    printed = capsys.readouterr().out
    assert "16 s6n" in printed
    assert "0.800" in printed
    assert "wrong: inf" in printed
