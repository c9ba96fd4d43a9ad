"""The main job as a child of a bench: run, and its result read back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from epdecode.result import Result
from epdecode.result.document import from_json


def run_job(
    config: str, overrides: tuple[str, ...], ranks: int, out: Path
) -> tuple[str, Result | None, str | None]:
    """Run it with ``ranks`` ranks on this node: status (or why it did not run), result, its path.

    out: folder of the run folder.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "epdecode.run"]
    done = subprocess.run(
        [*command, "--config", config, "--out", str(out), *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        line = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return f"ended with {done.returncode}: {done.stderr[-300:].strip()}", None, None
    if not line.get("result"):
        cause = line.get("cause") or {}
        return f"not here: {cause.get('message', 'no cause given')}", None, None
    path = line["result"]
    return line["status"], from_json(Path(path).read_text(), path), path
