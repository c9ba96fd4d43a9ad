"""status.json: written whole, read back, and the exit code of `epdecode status`."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import typer
from typer.testing import CliRunner

from epdecode.errors import ConfigError
from epdecode.result import Cause
from epdecode.result.status import (
    Status,
    describe,
    read_status,
    status_command,
    verdict,
    write_status,
)

APP = typer.Typer()
APP.command()(status_command)

LOST = Status(
    phase="steps",
    step=12,
    exit_code=6,
    cause=Cause(
        kind="stopped", rank=3, host="n7", step=12, stage="dispatch_wait", message="rank 3 ..."
    ),
)


def run(path, *flags):
    return CliRunner().invoke(APP, [str(path), *flags])


def test_round_trip(tmp_path):
    write_status(tmp_path / "status.json", LOST)
    assert read_status(tmp_path) == LOST
    assert read_status(tmp_path / "status.json") == LOST


def test_prints_and_exits_with_the_code(tmp_path):
    write_status(tmp_path / "status.json", LOST)
    result = run(tmp_path)
    assert result.exit_code == 6
    assert result.stdout.splitlines() == [
        "exit 6 (rank lost) in steps, step 12",
        "cause: stopped (rank 3, host n7, step 12, stage dispatch_wait)",
        "rank 3 ...",
    ]


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 6, 7, 8, 75, 130])
def test_every_code(tmp_path, code):
    write_status(tmp_path / "status.json", Status(phase="done", exit_code=code))
    assert run(tmp_path).exit_code == code
    result = run(tmp_path, "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["exit_code"] == code


def test_running_is_0(tmp_path):
    write_status(tmp_path / "status.json", Status(phase="warmup", step=3))
    result = run(tmp_path)
    assert result.exit_code == 0
    assert result.stdout.startswith("running: warmup, step 3 (updated ")


def test_writer_gone_without_an_end_is_6(tmp_path):
    code = (
        "import sys; from pathlib import Path; from epdecode.result.status import *; "
        "write_status(Path(sys.argv[1]), Status(phase='steps', step=4))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "status.json")], check=True)
    result = run(tmp_path)
    assert result.exit_code == 6
    assert "cause: killed" in result.stdout
    assert "left no end" in result.stdout


def test_a_later_process_with_the_same_number_is_not_the_writer():
    status = Status(phase="steps", pid_started=psutil.Process().create_time() - 500)
    assert status.pid == os.getpid()
    assert verdict(status).exit_code == 6


@pytest.mark.parametrize(("age_s", "code"), [(5, None), (300, 6)])
def test_on_another_host_the_age_decides(age_s, code):
    status = Status(phase="steps", host="elsewhere", updated=time.time() - age_s)
    assert verdict(status).exit_code == code


def test_an_end_is_final():
    status = replace(LOST, pid=2**22 + 1)
    assert verdict(status) is status


@pytest.mark.parametrize("text", ["", "{}", '{"phase": "nap"}', "[1]"])
def test_broken_status(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(ConfigError, match="not a status document"):
        read_status(tmp_path)


def test_missing_status(tmp_path):
    with pytest.raises(ConfigError, match=r"status\.json: No such file"):
        read_status(tmp_path)


def test_describe_unknown_code():
    assert describe(Status(phase="done", exit_code=99)) == "exit 99 (unknown) in done"
