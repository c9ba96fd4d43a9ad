"""scripts/: set-up, run and test, against doubles of python and pip."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
H200 = "configs/deepseek_v3-h200-deepep_ll.yaml"

# Knows its version, makes environments, and writes down what pip is asked for.
PYTHON = """#!/usr/bin/env bash
me=$(readlink -f "$0")
case "$*" in
--version) echo "Python {version}" ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$me" "$3/bin/python" ;;
"-m pip "*)
    shift 2
    echo "$*" >>"$TOLD/pip"
    [ -z "${{BROKEN_PIP:-}}" ] || {{ echo no index; exit 1; }}
    ;;
"-c import sys; sys.exit"*) exit {too_old} ;;
*) exit 1 ;;
esac
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    """A checkout's scripts and pyproject.toml, with nothing installed."""
    copy = tmp_path / "tree"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    shutil.copy(ROOT / "pyproject.toml", copy)
    (tmp_path / "bin").mkdir()
    return copy


def program(tree: Path, name: str, text: str) -> Path:
    path = tree.parent / "bin" / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def fake_python(tree: Path, name: str = "python3", version: str = "3.12.3") -> Path:
    too_old = int(tuple(map(int, version.split("."))) < (3, 11))
    return program(tree, name, PYTHON.format(version=version, too_old=too_old))


def sh(tree: Path, script: str, *arguments: str, **variables: str):
    """Run a script of the tree, with the doubles and the bare system on PATH."""
    env = {
        "PATH": f"{tree.parent}/bin:/usr/bin:/bin",
        "HOME": str(tree.parent),
        "TOLD": str(tree.parent),
    }
    return subprocess.run(
        ["bash", f"scripts/{script}", *arguments],
        cwd=tree,
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def pip_calls(tree: Path) -> list[str]:
    path = tree.parent / "pip"
    calls = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [call.removeprefix("install --disable-pip-version-check ") for call in calls]


# setup.sh


def test_setup_takes_the_cpu_torch_alone_and_first(tree) -> None:
    fake_python(tree)
    done = sh(tree, "setup.sh")
    assert done.stdout.strip() == str(tree / ".venv/bin/python"), done.stderr
    calls = pip_calls(tree)
    assert calls[0].startswith("torch==2.13.0")
    assert calls[1:] == ["--editable ."]


def test_setup_is_done_once(tree) -> None:
    fake_python(tree)
    sh(tree, "setup.sh")
    pip_calls(tree)
    assert sh(tree, "setup.sh").stdout.strip() == str(tree / ".venv/bin/python")
    assert pip_calls(tree) == []
    sh(tree, "setup.sh", "dev")
    assert pip_calls(tree)[-1] == "--editable .[dev]"
    (tree / ".venv/.epdecode-run").unlink()
    sh(tree, "setup.sh")
    assert pip_calls(tree) == [], "a dev environment is enough for a run"


def test_setup_is_done_again_for_other_dependencies(tree) -> None:
    fake_python(tree)
    sh(tree, "setup.sh")
    pip_calls(tree)
    with (tree / "pyproject.toml").open("a") as file:
        file.write("# another dependency\n")
    sh(tree, "setup.sh")
    assert pip_calls(tree)[-1] == "--editable ."


def test_setup_passes_over_an_old_python(tree) -> None:
    fake_python(tree, version="3.9.2")
    fake_python(tree, "python3.13", version="3.13.1")
    program(tree, "python3.12", "#!/bin/sh\necho 'pyenv: python3.12: command not found'; exit 127")
    assert sh(tree, "setup.sh").returncode == 0
    assert pip_calls(tree)


def test_setup_without_a_python(tree) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        fake_python(tree, name, version="3.9.2")
    done = sh(tree, "setup.sh")
    assert done.returncode == 3
    assert "Python 3.11 or above is needed" in done.stderr
    assert "EPDECODE_PYTHON" in done.stderr


def test_setup_without_an_index(tree) -> None:
    fake_python(tree)
    done = sh(tree, "setup.sh", BROKEN_PIP="1")
    assert done.returncode == 3
    assert "no index" in done.stderr
    assert "EPDECODE_PYTHON" in done.stderr
    assert not list((tree / ".venv").glob(".epdecode-*")), "not taken for done"


def test_setup_takes_the_gpu_set_where_there_is_a_gpu(tree) -> None:
    fake_python(tree, version="3.11.9")
    fake_python(tree, "python3.12")
    program(tree, "nvidia-smi", "#!/bin/sh\necho 9.0")
    assert sh(tree, "setup.sh", "dev").returncode == 0
    assert pip_calls(tree) == ["torch>=2.11,<2.13", "--editable .[cuda,dev]"]


def test_setup_leaves_an_older_gpu_alone(tree) -> None:
    fake_python(tree)
    program(tree, "nvidia-smi", "#!/bin/sh\necho 8.6")
    sh(tree, "setup.sh")
    assert pip_calls(tree)[0].startswith("torch==2.13.0")


def test_setup_takes_a_named_interpreter_as_it_is(tree) -> None:
    named = fake_python(tree, "mine")
    assert sh(tree, "setup.sh", EPDECODE_PYTHON=str(named)).stdout.strip() == str(named)
    assert pip_calls(tree) == []
    assert sh(tree, "setup.sh", EPDECODE_PYTHON="/nonexistent").returncode == 3


# run.sh

# The interpreter of run.sh: tells how torchrun is called, then does what JOB says.
JOB_PYTHON = """#!/usr/bin/env bash
case "$*" in
*torch.cuda.device_count*) [ -n "${{GPUS:-}}" ] && echo "$GPUS" ;;
"-m torch.distributed.run "*) printf '%s\\n' "$@" >"$TOLD/torchrun"; eval "${{JOB:-true}}" ;;
*) exec {python} "$@" ;;
esac
"""


def run_sh(tree: Path, *arguments: str, **variables: str):
    python = program(tree, "jobpython", JOB_PYTHON.format(python=sys.executable))
    done = sh(tree, "run.sh", *arguments, EPDECODE_PYTHON=str(python), **variables)
    told = tree.parent / "torchrun"
    return done, told.read_text().splitlines() if told.exists() else []


START = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.parametrize(
    ("arguments", "ranks", "rest"),
    [
        ([], "2", ["--config", "configs/cpu-tiny.yaml"]),
        (["run.steps=5"], "2", ["--config", "configs/cpu-tiny.yaml", "run.steps=5"]),
        (["--ranks", "4", "--config", "a b.yaml"], "4", ["--config", "a b.yaml"]),
        (["--config=x.yaml"], "2", ["--config=x.yaml"]),
    ],
)
def test_run_on_cpu(tree, arguments, ranks, rest) -> None:
    done, told = run_sh(tree, *arguments)
    assert done.returncode == 0, done.stderr
    assert told == [*START, ranks, "-m", "epdecode.run", *rest]


def test_run_takes_every_gpu(tree) -> None:
    program(tree, "nvidia-smi", "#!/bin/sh\n")
    _, told = run_sh(tree, GPUS="8")
    assert told == [*START, "8", "-m", "epdecode.run", "--config", H200]
    assert (ROOT / H200).is_file()


def test_run_without_the_gpu_libraries_says_so(tree) -> None:
    program(tree, "nvidia-smi", "#!/bin/sh\n")
    done, told = run_sh(tree)
    assert told[-1] == "configs/cpu-tiny.yaml"
    assert "epdecode doctor" in done.stderr


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ("echo '{\"exit_code\": 4}'; exit 1", 4),
        ("echo noise; exit 1", 1),
        ("exit 1", 1),
        ('echo \'{"status": "passed", "exit_code": 0}\'', 0),
        ("echo '{\"result\": \"'$TOLD'/runs/x/result.json\"}'; exit 1", 6),
    ],
)
def test_run_ends_with_the_code_of_the_job(tree, job, code) -> None:
    folder = tree.parent / "runs/x"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text('{"exit_code": 6}')
    done, _ = run_sh(tree, JOB=job)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_passes_signals_on_and_waits(tree, number) -> None:
    job = (
        'trap \'echo stopping; sleep 0.3; echo "{\\"exit_code\\": 75}"; exit 1\' TERM INT; '
        "touch $TOLD/ready; while :; do sleep 0.05; done"
    )
    python = program(tree, "jobpython", JOB_PYTHON.format(python=sys.executable))
    env = {
        "PATH": f"{tree.parent}/bin:/usr/bin:/bin", "HOME": str(tree.parent),
        "TOLD": str(tree.parent), "JOB": job, "EPDECODE_PYTHON": str(python),
    }  # fmt: skip
    child = subprocess.Popen(
        ["bash", "scripts/run.sh"], cwd=tree, env=env, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 20
    while not (tree.parent / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(number)
    output, _ = child.communicate(timeout=20)
    assert output.splitlines()[0] == "stopping"
    assert child.returncode == 75


@pytest.mark.torchrun
def test_run_for_real(tmp_path) -> None:
    env = {**os.environ, "EPDECODE_PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts/run.sh"), "--out", str(tmp_path)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["status"], line["world_size"]) == ("passed", 2)
    assert Path(line["result"]).is_relative_to(tmp_path)


# test.sh


def test_gpu_tests_without_a_gpu_say_what_is_missing() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/test.sh"), "--gpu"],
        env={**os.environ, "EPDECODE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert "no torch with a usable CUDA GPU" in done.stderr


# offline_gpu.sh fetch; the rest is in test_offline_gpu.py


def test_fetch_asks_for_the_pinned_wheels_of_that_python(tree) -> None:
    fake_python(tree, "python3")
    done = sh(tree, "offline_gpu.sh", "fetch", "--wheels", "carried", "typer")
    assert done.returncode == 0, done.stderr
    (call,) = pip_calls(tree)
    words = call.split()
    assert words[0] == "download"
    assert {"tokenspeed-deepep==1.2.1.post20251110", "typer", "--no-deps"} <= set(words)
    assert words[words.index("--python-version") + 1] == "3.12"
    assert words[words.index("--dest") + 1] == "carried"
    assert "manylinux_2_28_x86_64" in words
