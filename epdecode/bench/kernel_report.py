"""The kernel bench's result: one line a shape, as a table or as JSON."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epdecode.bench.timing import Streams


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the result; times in microseconds, None where nothing was timed.

    share_*: the part of the read rate that num_bytes in that time come to. speedup: plain / hot.
    """

    op: str
    shape: dict[str, int | str]
    num_bytes: int
    correct: bool
    difference: str
    hot_us: float | None = None
    cold_us: float | None = None
    floor_us: float | None = None
    share_hot: float | None = None
    share_cold: float | None = None
    plain_us: float | None = None
    padded_plain_us: float | None = None
    speedup: float | None = None


def document(lines: list[Line], streams: Streams | None) -> dict[str, object]:
    """The bench as one JSON object."""
    import torch
    import triton

    return {
        "schema": "epdecode.bench.kernels/1",
        "device": torch.cuda.get_device_name() if streams else "cpu (interpreter)",
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "timed": streams is not None,
        "streams": asdict(streams) if streams else None,
        "method": "CUDA graphs; hot: 20 calls on the same buffers; cold: buffers rotated over more "
        "than 300 MB; medians of replays; floor: bytes at the read rate measured in this run",
        "lines": [asdict(line) for line in lines],
    }


def print_table(lines: list[Line], streams: Streams | None) -> None:
    """The bench as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if os.isatty(1) else 170)
    if streams is None:
        console.print(
            "No GPU: correctness only, small shapes, under Triton's interpreter. No times."
        )
    else:
        console.print(
            f"Streams measured now: read {streams.read_tb_s:.2f} TB/s, copy "
            f"{streams.copy_tb_s:.2f} TB/s. Times in us, medians, inside CUDA graphs; hot / cold = "
            "same buffers / rotated over more than 300 MB; share = bytes at the read rate."
        )
    table = Table("op", "shape", "check")
    for name in ("kB", "floor", "hot", "cold", "share hot", "share cold", "plain", "speed-up"):
        table.add_column(name, justify="right")
    for line in lines:
        shape = " ".join(f"{key}={value}" for key, value in line.shape.items())
        table.add_row(line.op, shape, line.difference or "ok", *_figures(line))
    console.print(table)


def _figures(line: Line) -> list[str]:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        f"{line.num_bytes / 1e3:.0f}",
        text(line.floor_us, ".1f"),
        text(line.hot_us, ".2f"),
        text(line.cold_us, ".2f"),
        text(line.share_hot, ".2f"),
        text(line.share_cold, ".2f"),
        text(line.plain_us, ".1f"),
        text(line.speedup, ".1f"),
    ]
