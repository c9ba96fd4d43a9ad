"""epdecode launch: rendered scripts are golden files, and refuse what the plan refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epdecode.errors import ConfigError, EnvironmentFault
from epdecode.launch.command import Job, app, render
from epdecode.launch.route import find_route
from tests.launch.scripts import ROOT

GOLDEN = Path(__file__).parent / "golden"
UPDATE = os.environ.get("EPDECODE_UPDATE_GOLDEN") == "1"
"""Set it to write the files anew; then read the difference."""

IMAGE = '"${EPDECODE_IMAGE:?the container image}"'
GENERAL = {
    "multinode.sbatch": Job(),
    "multinode-pyxis.sbatch": Job(name="multinode-pyxis.sbatch", container=IMAGE),
}
RENDERED = {
    "cpu-two-nodes.sbatch": ["-c", "cpu-tiny", "--nodes", "2"],
    "h200x8-two-nodes.sbatch": [
        "-c", "deepseek_v3-h200x8-deepep_ll", "--nodes", "2", "--partition", "gpu",
        "--account", "infer", "--time", "01:00:00", "run.steps=50",
    ],
    "h200x8-pyxis.sbatch": [
        "-c", "deepseek_v3-h200x8-deepep_ll", "--nodes", "1", "--container", "img#1:tag x",
    ],
}  # fmt: skip


def compare(text: str, path: Path) -> None:
    if UPDATE:
        path.write_text(text)
    assert text == path.read_text(), "EPDECODE_UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize("name", GENERAL)
def test_the_scripts_of_launch_come_from_the_template(name) -> None:
    compare(render(GENERAL[name]), ROOT / "launch" / name)


@pytest.mark.parametrize("name", RENDERED)
def test_rendered(name, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["slurm", *RENDERED[name], "--dry-run"])
    assert result.exit_code == 0, result.output
    compare(result.stdout, GOLDEN / name)


def test_a_plan_that_cannot_be_is_refused_before_anything_is_submitted() -> None:
    arguments = ["slurm", "-c", "deepseek_v3-h200x8-deepep_ll", "-N", "3", "--ranks-per-node", "7"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "21 ranks" in str(result.exception)


def test_submit(monkeypatch, tmp_path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\ncat >{tmp_path}/script\necho Submitted batch job 12\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["slurm", *RENDERED["cpu-two-nodes.sbatch"]])
    assert result.stdout == "Submitted batch job 12\n"
    assert (tmp_path / "script").read_text() == (GOLDEN / "cpu-two-nodes.sbatch").read_text()


def test_submit_without_slurm(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    result = CliRunner().invoke(app, ["slurm", "-c", "cpu-tiny"])
    assert isinstance(result.exception, EnvironmentFault)
    assert "--dry-run" in str(result.exception)


INTERFACES = {"lo": ["127.0.0.1"], "ib0": ["10.9.0.1", "10.9.0.2"], "down0": []}


@pytest.mark.parametrize(
    ("host", "named", "expected"),
    [
        ("anything.invalid", "ib0", ("ib0", "10.9.0.1")),
        ("127.0.0.1", "ib0", ("ib0", "10.9.0.1")),
        ("anything.invalid", "lo", ("lo", "127.0.0.1")),
    ],
)
def test_route_over_a_named_interface(host, named, expected) -> None:
    assert find_route(host, named, INTERFACES) == expected


@pytest.mark.parametrize(
    ("host", "named", "message"),
    [
        ("127.0.0.1", "", "loopback"),
        ("localhost", "", "loopback"),
        ("10.9.0.1", "ibO", "did you mean 'ib0'"),
        ("10.9.0.1", "down0", "no interface with an IPv4 address"),
        ("no-such-host.invalid", "", "cannot be reached"),
    ],
)
def test_route_refused(host, named, message) -> None:
    with pytest.raises(EnvironmentFault, match="interfaces: lo") as caught:
        find_route(host, named, INTERFACES)
    assert message in str(caught.value)
