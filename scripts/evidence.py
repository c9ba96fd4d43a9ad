"""Rows of docs/h200.md from result files: date, commit, command, figures.

python scripts/evidence.py [--commit HASH] runs/*/result.json

--commit names the source where it travelled to the GPU without its history (EPDECODE_COMMIT unset).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HEAD = (
    "| date | commit | command | verified rows, worst error | layer p50 us | floor us (reached) |\n"
    "|---|---|---|---|---|---|"
)


def command(result: dict[str, Any]) -> str:
    """The run's own command line, without paths of the machine it ran on."""
    words = result["provenance"]["command"][1:]
    kept, skip = [], False
    for word in words:
        if skip or word == "--out":
            skip = word == "--out"
            continue
        kept.append(word.removeprefix("--config="))
    shown = " ".join(word for word in kept if word != "--config")
    return f"`{result['method']['world_size']} rank(s): {shown}`"


def row(path: Path, commit: str | None) -> str:
    """One result as a table row; shared GPUs report no speed."""
    result = json.loads(path.read_text())
    checked, floor = result["verification"], result["layer_floor"]
    speed = reached = "shared GPU: none"
    if result["timing"] and floor:
        speed = f"{result['timing']['layer']['p50']:.1f}"
        reached = f"{floor['floor_us']:.1f} ({floor['fraction']:.0%})"
    figures = result["status"]
    if checked and result["status"] == "passed":
        figures = (
            f"{checked['rows']}, {checked['worst_error']:.4f} "
            f"(tolerance {checked['tolerance']:.4f})"
        )
    return (
        f"| {result['provenance']['started_utc'][:10]} "
        f"| {result['provenance']['commit'] or commit} "
        f"| {command(result)} | {figures} | {speed} | {reached} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit")
    parser.add_argument("results", nargs="+", type=Path)
    arguments = parser.parse_args()
    print(HEAD)
    for each in arguments.results:
        print(row(each, arguments.commit))
