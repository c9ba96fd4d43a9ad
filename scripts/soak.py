"""A long run whose memory, file descriptors and threads are watched from outside.

python scripts/soak.py --ranks 2 --steps 5000 [--config X] [a.b=value ...]

Samples every rank's process once a second and prints one JSON object: for each quantity the median
of the first and of the last quarter of the timed run. Exit code 1 when memory grew by more than 5%
or descriptors or threads by more than two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import psutil

WARM_S = 10.0
"""Loading and compiling are no part of it."""


def sample(launcher: psutil.Process) -> dict[int, tuple[float, int, int]]:
    """pid -> resident MiB, descriptors, threads of the ranks that live."""
    found = {}
    for child in launcher.children(recursive=True):
        try:
            if "epdecode.run" in " ".join(child.cmdline()):
                memory = child.memory_info().rss / 2**20
                found[child.pid] = (memory, child.num_fds(), child.num_threads())
        except psutil.Error:
            continue
    return found


def quarters(values: list[float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter."""
    size = max(1, len(values) // 4)
    return statistics.median(values[:size]), statistics.median(values[-size:])


def main() -> int:
    """Run, sample, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5000, help="of each of the two passes")
    parser.add_argument("--config", default="cpu-tiny")
    parser.add_argument("override", nargs="*")
    arguments = parser.parse_args()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={arguments.ranks}",
        *("-m", "epdecode.run", "--config", arguments.config, f"run.steps={arguments.steps}"),
        *arguments.override,
    ]
    series: dict[int, list[tuple[float, int, int]]] = {}
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        launcher = psutil.Process(job.pid)
        while job.poll() is None:
            time.sleep(1)
            if time.monotonic() - begun > WARM_S and launcher.is_running():
                for pid, one in sample(launcher).items():
                    series.setdefault(pid, []).append(one)
        assert job.stdout is not None
        last = json.loads(job.stdout.read().splitlines()[-1])
    ranks, flat = [], last["status"] == "passed"
    for pid, values in series.items():
        memory, descriptors, threads = (quarters(list(one)) for one in zip(*values, strict=True))
        flat &= memory[1] <= 1.05 * memory[0]
        flat &= descriptors[1] <= descriptors[0] + 2 and threads[1] <= threads[0] + 2
        ranks.append(
            {"pid": pid, "samples": len(values), "memory_mib": memory, "descriptors": descriptors,
             "threads": threads}
        )  # fmt: skip
    print(json.dumps({"flat": flat, "status": last["status"], "steps": arguments.steps,
                      "seconds": round(time.monotonic() - begun), "ranks": ranks}))  # fmt: skip
    return 0 if flat and ranks else 1


if __name__ == "__main__":
    sys.exit(main())
