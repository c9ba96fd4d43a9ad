"""Launch scripts run with a Python that only tells how it was called."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# Answers launch_route itself, and writes down what torchrun would have been given.
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "${{2:-}}" = epdecode.launch.route ]; then exec {python} "$@"; fi
printf '%s\\n' "$@" >"$TOLD/arguments"
env >"$TOLD/environment"
"""

PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR")


@dataclass(frozen=True)
class Told:
    """How the fake Python was called; ``arguments`` is empty when it was not."""

    code: int
    stderr: str
    arguments: list[str]
    environment: dict[str, str]

    def option(self, name: str) -> str:
        return self.arguments[self.arguments.index(name) + 1]


def call(script: str, *arguments: str, folder: Path, env: dict[str, str] | None = None) -> Told:
    """Run a script of the repository in a bare environment, with the fake Python."""
    fake = folder / "python"
    fake.write_text(FAKE_PYTHON.format(python=sys.executable))
    fake.chmod(0o755)
    base = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    child = subprocess.run(
        ["bash", str(ROOT / script), *arguments],
        env={**base, "EPDECODE_PYTHON": str(fake), "TOLD": str(folder), **(env or {})},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    told, environment = folder / "arguments", folder / "environment"
    pairs = environment.read_text().splitlines() if environment.exists() else []
    return Told(
        child.returncode,
        child.stderr,
        told.read_text().splitlines() if told.exists() else [],
        dict(pair.split("=", 1) for pair in pairs if "=" in pair),
    )
