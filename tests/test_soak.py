"""scripts/soak.py: what it samples, and what it takes for growth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import soak

ROOT = Path(__file__).resolve().parent.parent


def written(folder: Path, name: str, values: list[float]) -> list[str]:
    lines = [json.dumps({"memory_mib": 300.0, name: value}) for value in values]
    (folder / "1.soak.jsonl").write_text("\n".join(lines))
    (one,) = soak.summaries(folder)
    return one["grew"]


@pytest.mark.parametrize(
    ("name", "may", "too_much"),
    [
        ("allocated_mib", 1009, 1011),
        ("device_used_mib", 1009, 1011),
        ("descriptors", 1002, 1003),
    ],
)
def test_growth(tmp_path, name, may, too_much) -> None:
    assert written(tmp_path, name, [1000] * 5 + [may] * 5) == []
    assert written(tmp_path, name, [1000] * 5 + [too_much] * 5) == [name]


def test_a_rank_without_samples_is_no_flat_rank(tmp_path) -> None:
    (tmp_path / "1.soak.jsonl").write_text("")
    assert list(soak.summaries(tmp_path)) == []


@pytest.mark.torchrun
@pytest.mark.timeout(200)
def test_a_short_one() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/soak.py", "--ranks", "1", "--steps", "60"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=190,
        check=False,
    )
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["status"], len(last["ranks"])) == ("passed", 1), done.stderr
    assert last["verified_rows"] > 0
    assert last["ranks"][0]["samples"] > 1
