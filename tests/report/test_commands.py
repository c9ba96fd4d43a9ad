"""`epdecode report` and `epdecode compare` on run folders."""

import json
from dataclasses import replace

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from epdecode.errors import ConfigError, NotSaved
from epdecode.report.commands import compare_command, report_command
from epdecode.report.prometheus import metrics
from epdecode.result.document import to_json
from epdecode.result.samples import SampleWriter
from epdecode.result.save import RunFolder, save_result
from epdecode.result.status import Status, write_status
from tests.documents import METHOD, make_result

APP = typer.Typer()
APP.command("report")(report_command)
APP.command("compare")(compare_command)


def run(*arguments):
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.create(tmp_path, "one", "1" * 16)
    save_result(made, to_json(make_result()))
    samples = SampleWriter(made, 0)
    samples.add("plain", 0, 100.0)
    samples.close()
    return made


def test_report_on_the_console(folder):
    for target in (folder.path, folder.result):
        result = run("report", target)
        assert result.exit_code == 0
        assert "PASSED" in result.stdout


def test_report_as_page(folder):
    result = run("report", folder.path, "--html")
    assert result.stdout.strip() == str(folder.path / "report.html")
    assert "Steps over time" in (folder.path / "report.html").read_text()


def test_report_as_metrics(folder, tmp_path):
    target = tmp_path / "epdecode.prom"
    assert run("report", folder.path, "--prometheus", target).exit_code == 0
    assert target.read_text() == metrics(make_result())


def test_metrics_are_what_the_result_says():
    result = make_result()
    families = {f.name: f for f in text_string_to_metric_families(metrics(result))}
    steps = {s.labels["quantile"]: s.value for s in families["epdecode_step_seconds"].samples}
    assert steps["0.5"] == pytest.approx(result.timing.step.p50 / 1e6)
    stages = {s.labels["stage"] for s in families["epdecode_stage_seconds"].samples}
    assert stages == set(result.timing.stages)
    passed = families["epdecode_passed"].samples[0]
    assert passed.value == 1
    assert passed.labels["transport"] == "deepep_ll"


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_metrics_of_a_run_that_did_not_pass(status):
    families = {
        f.name: f for f in text_string_to_metric_families(metrics(make_result(status=status)))
    }
    assert families["epdecode_passed"].samples[0].value == 0
    assert "epdecode_step_seconds" not in families


def test_unwritable_target(folder, tmp_path):
    result = run("report", folder.path, "--prometheus", tmp_path / "no" / "x.prom")
    assert isinstance(result.exception, NotSaved)


def test_no_result(tmp_path):
    made = RunFolder.create(tmp_path, "none", "1" * 16)
    write_status(made.status, Status(phase="steps", exit_code=6))
    error = run("report", made.path).exception
    assert isinstance(error, ConfigError)
    assert "result.json: No such file" in str(error)
    assert "`epdecode status` says how" in str(error)


def test_compare(folder, tmp_path):
    other = RunFolder.create(tmp_path, "two", "2" * 16)
    save_result(other, to_json(make_result()))
    result = run("compare", folder.path, other.path)
    assert result.exit_code == 0
    assert "x1.000" in result.stdout
    document = json.loads(run("compare", folder.path, other.path, "--json").stdout)
    assert document["figures"]["step p50"]["ratios"] == [1, 1]


def test_compare_refuses_unlike_work(folder, tmp_path):
    other = RunFolder.create(tmp_path, "two", "2" * 16)
    save_result(other, to_json(make_result(method=replace(METHOD, world_size=8))))
    error = run("compare", folder.path, other.path).exception
    assert isinstance(error, ConfigError)
    assert run("compare", folder.path, other.path, "--force").exit_code == 0
