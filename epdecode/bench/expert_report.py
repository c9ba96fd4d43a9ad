"""The expert bench's result: one line per shape and backend, as a table or as JSON."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epdecode.bench.timing import Streams
    from epdecode.plan.expert_choice import Choice


@dataclass(frozen=True, slots=True)
class Line:
    """One backend on one shape; times per layer in microseconds, None where nothing was timed.

    error: relative Frobenius error against float32 arithmetic on the same FP8 inputs. share: the
    floor over p50. note: why a backend is absent, or what is wrong.
    """

    experts: int
    rows: int
    hidden: int
    size: int
    load: str
    backend: str
    correct: bool
    note: str = ""
    choice: Choice | None = None
    error: float | None = None
    floor_us: float | None = None
    us: float | None = None
    share: float | None = None


def document(lines: list[Line], streams: Streams) -> dict[str, object]:
    """The bench as one JSON object."""
    import torch
    import triton

    return {
        "schema": "epdecode.bench.experts/1",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "streams": asdict(streams),
        "method": "six layers with their own weights in one CUDA graph, median of replays, per "
        "layer; floor: weights of the experts with rows at the read rate measured in this run",
        "lines": [asdict(line) for line in lines],
    }


def print_table(lines: list[Line], streams: Streams) -> None:
    """The bench as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if os.isatty(1) else 150)
    console.print(
        f"Read rate measured now: {streams.read_tb_s:.2f} TB/s. us per layer, six layers with "
        "their own weights in one CUDA graph; share = weights of experts with rows at that rate."
    )
    table = Table("experts", "rows", "H x I", "load", "backend", "cut", "check")
    for name in ("floor", "us", "share"):
        table.add_column(name, justify="right")
    for line in lines:
        check = line.note or f"ok {line.error:.4f}"
        table.add_row(
            str(line.experts),
            str(line.rows),
            f"{line.hidden} x {line.size}",
            line.load,
            line.backend,
            _cut(line.choice),
            check,
            *(
                "" if value is None else format(value, form)
                for value, form in ((line.floor_us, ".1f"), (line.us, ".1f"), (line.share, ".3f"))
            ),
        )
    console.print(table)


def _cut(choice: Choice | None) -> str:
    """Tokens of a tile, stages, n = narrow, k = parts of K."""
    if choice is None:
        return ""
    narrow = "n" if choice.narrow else ""
    splits = f" k{choice.splits}" if choice.splits > 1 else ""
    return f"{choice.tokens} s{choice.stages}{narrow}{splits}"
