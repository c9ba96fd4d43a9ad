"""result.json: strict, round trip, described by the shipped schema; the last line of a run."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import jsonschema
import pytest

from epdecode.errors import ConfigError
from epdecode.result import STAGES, Cause, ExpertLoad, Result, Timing, Verification
from epdecode.result.document import (
    SCHEMA_FILE,
    failure_line,
    from_json,
    schema_json,
    summary_line,
    to_json,
    withhold_speed,
)
from tests.documents import METHOD, make_result

SHARED = replace(METHOD, shared_gpu=True)


def test_shipped_schema_is_current():
    assert json.loads(SCHEMA_FILE.read_text()) == json.loads(schema_json())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"timing": None, "throughput": None, "floors": {}, "layer_floor": None},
        {"status": "failed", "cause": Cause(kind="exited", rank=3, host="n", message="gone")},
    ],
)
def test_round_trip_and_schema(changes):
    result = make_result(**changes)
    text = to_json(result)
    jsonschema.validate(json.loads(text), json.loads(SCHEMA_FILE.read_text()))
    again = from_json(text)
    assert json.loads(to_json(again)) == json.loads(text)
    assert again == from_json(to_json(again))


def test_every_documented_field_is_there():
    document = json.loads(to_json(make_result()))
    assert document["schema"] == "epdecode.result/1"
    assert set(document["timing"]["stages"]) == set(STAGES)
    figures = {"unit", "n", "mean", "std", "min", "p50", "p90", "p99", "max"}
    assert set(document["timing"]["step"]) == figures
    assert document["step_counts"] == {"graph": 50, "eager": 0, "skipped": 0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_is_named(bad):
    result = make_result(expert_load=ExpertLoad(max=1, mean=1, imbalance=bad))
    with pytest.raises(ValueError, match=r"^result\.expert_load\.imbalance: (nan|-?inf)"):
        to_json(result)


def test_non_finite_in_plan_is_named():
    with pytest.raises(ValueError, match=r"^result\.plan\.stages\[1\]\.us: nan"):
        to_json(make_result(plan={"stages": [{"us": 1.0}, {"us": math.nan}]}))


def test_foreign_types_are_named():
    with pytest.raises(ValueError, match=r"^result\.plan\.path: object"):
        to_json(make_result(plan={"path": object()}))
    with pytest.raises(ValueError, match=r"^result\.plan: key 3 is not"):
        to_json(make_result(plan={3: 1}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ("{}", "status: (Field|Missing)"),
        ('{"shema": 1}', "status|shema"),
    ],
)
def test_broken_documents_are_config_errors(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        from_json(text, "there.json")
    assert str(caught.value).startswith("there.json: ")


def test_unknown_keys_are_refused():
    document = json.loads(to_json(make_result()))
    document["method"]["speling"] = 1
    with pytest.raises(ConfigError, match=r"method\.speling"):
        from_json(json.dumps(document))


def test_summary_line():
    result = make_result()
    line = summary_line(result, "runs/x/result.json")
    assert "\n" not in line
    summary = json.loads(line)
    assert summary["status"] == "passed"
    assert summary["exit_code"] == 0
    assert summary["result"] == "runs/x/result.json"
    assert summary["step_us_p50"] == result.timing.step.p50
    assert summary["layer_us_p50"] == result.timing.layer.p50
    assert summary["tokens_per_s"] == result.throughput.tokens_per_s
    assert summary["fraction_of_floor"] == 0.78
    assert summary["transport"] == "deepep_ll"
    assert summary["world_size"] == 4


SPEEDS = ("step_us_p50", "layer_us_p50", "tokens_per_s", "fraction_of_floor")


@pytest.mark.parametrize(
    "changes", [{"method": SHARED}, {"status": "wrong"}, {"status": "interrupted"}]
)
def test_summary_line_has_no_speed_that_does_not_count(changes):
    summary = json.loads(summary_line(make_result(**changes), None))
    assert [summary[name] for name in SPEEDS] == [None] * 4
    assert summary["result"] is None


@pytest.mark.parametrize(
    ("status", "code"),
    [("passed", 0), ("wrong", 4), ("degraded", 6), ("interrupted", 75), ("failed", 1)],
)
def test_summary_line_exit_code(status, code):
    result = make_result(status=status)
    assert json.loads(summary_line(result, None))["exit_code"] == code
    assert json.loads(summary_line(result, None, exit_code=8))["exit_code"] == 8


def test_failure_line():
    line = json.loads(failure_line(2, Cause(kind="config", message="toopk"), None))
    assert (line["status"], line["exit_code"], line["run_dir"]) == ("failed", 2, None)
    assert line["cause"]["message"] == "toopk"


def test_shared_gpu_result_cannot_carry_a_speed():
    result = make_result(method=SHARED)
    with pytest.raises(ValueError, match=r"result\.timing: ranks shared a GPU"):
        to_json(result)
    text = to_json(withhold_speed(result))
    document = json.loads(text)
    assert document["timing"] is None
    assert document["floors"]["gate_up_gemm"]["fraction"] is None
    assert document["floors"]["gate_up_gemm"]["floor_us"] == 45.4
    with pytest.raises(ValueError, match=r"result\.layer_floor\.fraction"):
        to_json(replace(withhold_speed(result), layer_floor=result.layer_floor))


def test_non_finite_error_is_written_as_null():
    check = Verification(
        passed=False, rows=8, worst_row=3, worst_error=None, tolerance=0.1, reference="torch"
    )
    document = json.loads(to_json(make_result(status="wrong", verification=check)))
    assert document["verification"]["worst_error"] is None


def test_imports_no_torch():
    code = (
        "import sys, epdecode.result.document, epdecode.result.status, epdecode.result.samples, "
        "epdecode.result.timing, epdecode.report.console; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_field_is_explained():
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "result.md").read_text()
    for name in (*(one.name for one in (*fields(Result), *fields(Timing))), *STAGES):
        assert any(f"`{text}" in page for text in (f"{name}`", f"timing.{name}`", f"{name}.")), name
