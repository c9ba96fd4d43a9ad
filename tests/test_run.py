"""The main job as users start it: torchrun, the JSON line, the run folder, one clear error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from epdecode.errors import Exit
from epdecode.result import STAGES
from epdecode.result.document import SCHEMA_FILE, from_json

ROOT = Path(__file__).parent.parent
ONE = [sys.executable, "-m", "epdecode.run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(command: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SLURM_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(launcher)}
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110, check=False
    )


def last_line(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


def no_nan(token: str) -> float:
    raise AssertionError(f"{token} in JSON")


@pytest.mark.torchrun
def test_two_ranks_pass_and_leave_a_whole_run_folder(tmp_path: Path) -> None:
    done = run([*TORCHRUN, "2", "-m", "epdecode.run", "run.steps=4", "--out", str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    line = last_line(done)
    assert line["status"] == "passed"
    assert line["world_size"] == 2
    assert line["worst_error"] <= line["tolerance"]
    folder = Path(line["result"]).parent
    document = json.loads((folder / "result.json").read_text(), parse_constant=no_nan)
    jsonschema.validate(document, json.loads(SCHEMA_FILE.read_text()))
    result = from_json((folder / "result.json").read_text())
    assert result.step_counts.eager == 8
    assert result.step_counts.skipped == 0
    assert [place.rank for place in result.provenance.ranks] == [0, 1]
    assert set(result.timing.stages) == set(STAGES) - {"expert_chain"}, "no one launch on a CPU"
    samples = [json.loads(one) for one in (folder / "samples.jsonl").read_text().splitlines()]
    assert {(s["rank"], s["pass"]) for s in samples} == {
        (rank, name) for rank in (0, 1) for name in ("plain", "instrumented")
    }
    status = json.loads((folder / "status.json").read_text())
    assert (status["phase"], status["exit_code"]) == ("done", 0)
    assert all(f"log/rank0000{rank}.log" for rank in (0, 1))
    assert (folder / "log" / "rank00001.log").exists()


def test_the_resolved_config_runs_again_to_the_same_digest(tmp_path: Path) -> None:
    quick = ["run.steps=2", "run.warmup_steps=1"]
    first = run([*ONE, *quick, "--out", str(tmp_path)])
    assert first.returncode == 0, first.stderr[-3000:]
    folder = Path(last_line(first)["result"]).parent
    again = run([*ONE, "--config", str(folder / "config.yaml"), "--out", str(tmp_path)])
    digests = {
        json.loads(Path(last_line(done)["result"]).read_text())["config_digest"]
        for done in (first, again)
    }
    assert len(digests) == 1


def test_print_config_prints_yaml_and_does_nothing(tmp_path: Path) -> None:
    done = run([*ONE, "--print-config", "routing.seed=7", "--out", str(tmp_path / "none")])
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["routing"]["seed"] == 7
    assert not (tmp_path / "none").exists()


def test_print_config_needs_no_gpu() -> None:
    done = run([*ONE, "--config", "deepseek_v3-h200-deepep_ll", "--print-config"])
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["transport"]["name"] == "deepep_ll"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["layrs=3"], Exit.CONFIG, "did you mean 'layers'"),
        (["parallel.ep=4"], Exit.CONFIG, "parallel.ep: got 4 with 1 ranks"),
        (["batch.buckets=[1,32]"], Exit.CONFIG, "max_tokens_per_rank = 16"),
        (["--config", "no-such-preset"], Exit.CONFIG, "no such file or preset"),
        (["--config", "deepseek_v3-h200-deepep_ll"], Exit.ENVIRONMENT, "needs a CUDA GPU"),
        (["--out", "/proc/none"], Exit.ENVIRONMENT, "--out: "),
    ],
)
def test_a_mistake_is_one_clear_error(arguments: list[str], code: Exit, said: str) -> None:
    done = run([*ONE, *arguments])
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.torchrun
def test_torchrun_prints_a_mistake_once_per_node() -> None:
    done = run([*TORCHRUN, "2", "-m", "epdecode.run", "layrs=3"])
    assert done.returncode != 0
    assert done.stderr.count("did you mean 'layers'") == 1
