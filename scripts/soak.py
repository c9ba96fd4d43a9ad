"""A long run whose memory, file descriptors and threads are watched while it steps.

python scripts/soak.py --ranks 2 --steps 5000 [--config X] [a.b=value ...]

Every rank samples itself during the timed steps: resident memory, descriptors, threads and, on a
GPU, what torch holds there (allocated, reserved) and what the device has in use altogether. Prints
one JSON object: for each quantity the medians of the first and of the last quarter of the samples,
and the verification that follows the steps. Exit code 1 when the run did not pass, when resident
memory grew by more than 5%, device memory by more than 1%, or descriptors or threads by more than
two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from epdecode import run
from epdecode.errors import ConfigError
from epdecode.result.status import read_status

INTERVAL_S = 0.1
MAY_GROW = {
    "memory_mib": (1.05, 0.0),
    "descriptors": (1.0, 2.0),
    "threads": (1.0, 2.0),
    "allocated_mib": (1.01, 0.0),
    "reserved_mib": (1.01, 0.0),
    "device_used_mib": (1.01, 0.0),
}
"""Quantity -> (factor, addend): most that the last quarter's median may be of the first's."""


def sample() -> dict[str, float]:
    """This process's figures now."""
    me = psutil.Process()
    found = {
        "memory_mib": me.memory_info().rss / 2**20,
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found["allocated_mib"] = torch.cuda.memory_allocated() / 2**20
        found["reserved_mib"] = torch.cuda.memory_reserved() / 2**20
        found["device_used_mib"] = (total - free) / 2**20
    return found


def keep_sampling(out: Path, into: Path) -> None:
    """One JSON line every INTERVAL_S while status.json says that the steps run."""
    with into.open("w", buffering=1) as lines:
        while True:
            time.sleep(INTERVAL_S)
            if _phase(out) == "steps":
                lines.write(json.dumps(sample()) + "\n")


def _phase(out: Path) -> str | None:
    for path in out.glob("*/status.json"):
        try:
            return read_status(path).phase
        except ConfigError:
            return None
    return None


def rank_main(out: Path, arguments: list[str]) -> int:
    """One rank: epdecode.run with a thread that samples."""
    into = out / f"{psutil.Process().pid}.soak.jsonl"
    threading.Thread(target=keep_sampling, args=(out, into), daemon=True).start()
    return run.main([*arguments, "--out", str(out)])


def quarters(values: list[float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter."""
    size = max(1, len(values) // 4)
    return statistics.median(values[:size]), statistics.median(values[-size:])


def grew(name: str, first: float, last: float) -> bool:
    """More than this quantity may."""
    factor, addend = MAY_GROW[name]
    return last > factor * first + addend


def summaries(out: Path) -> Iterator[dict[str, object]]:
    """What each rank's samples come to."""
    for path in sorted(out.glob("*.soak.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if not lines:
            continue
        figures = {name: quarters([line[name] for line in lines]) for name in lines[0]}
        yield {
            "samples": len(lines),
            **{name: [round(value, 1) for value in pair] for name, pair in figures.items()},
            "grew": [name for name, pair in figures.items() if grew(name, *pair)],
        }


def soak(arguments: argparse.Namespace, out: Path) -> int:
    """Run, compare, print."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={arguments.ranks}", __file__, "--inside", str(out)),
        *("--config", arguments.config, f"run.steps={arguments.steps}", *arguments.override),
    ]
    begun = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    last = json.loads(done.stdout.splitlines()[-1])
    ranks = list(summaries(out))
    checked = json.loads(Path(last["result"]).read_text())["verification"] if last["result"] else {}
    flat = len(ranks) == arguments.ranks and not any(rank["grew"] for rank in ranks)
    print(json.dumps({
        "flat": flat, "status": last["status"], "steps": arguments.steps, "passes": 2,
        "seconds": round(time.monotonic() - begun),
        "verified_rows": checked.get("rows"), "worst_error": checked.get("worst_error"),
        "ranks": ranks,
    }))  # fmt: skip
    return 0 if flat and last["status"] == "passed" else 1


def main() -> int:
    """The launcher; with --inside, one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5000, help="of each of the two passes")
    parser.add_argument("--config", default="cpu-tiny")
    parser.add_argument("override", nargs="*")
    with tempfile.TemporaryDirectory(prefix="epdecode-soak-") as out:
        return soak(parser.parse_intermixed_args(), Path(out))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(rank_main(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
