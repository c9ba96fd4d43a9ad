"""`epdecode bench experts`: every expert backend side by side, right first, then share of floor.

Six layers with their own weights in one CUDA graph; the floor is the weights of the experts that
got rows at the read rate measured in the same run.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from epdecode.bench.expert_report import Line, document, print_table
from epdecode.errors import ConfigError, Exit
from epdecode.plan.expert_choice import ExpertShape

if TYPE_CHECKING:
    from epdecode.bench.expert_cases import ExpertCase

SHAPES = (
    *((32, rows, 7168, 2048) for rows in (4, 16, 32, 64)),
    *((16, rows, 7168, 2048) for rows in (16, 64)),
    *((8, rows, 7168, 2048) for rows in (16, 64, 128)),
    (4, 64, 7168, 2048),
    (2, 128, 7168, 2048),
    *((16, rows, 4096, 1536) for rows in (16, 64)),
    (16, 32, 2048, 768),
    (128, 4, 2048, 768),
)
"""Local experts, rows per expert, hidden, expert size: shares of DeepSeek-V3 at EP8 to EP128, of
Qwen3-235B and Qwen3-30B at EP8, and Qwen3-30B on one GPU."""
MODEL_ROWS = (4, 8, 16, 32, 64, 128)


def experts(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A model's shape, with --ep; all its loads.")
    ] = None,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Ranks that share the experts.")] = 8,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="E,rows,H,I: local experts, rows per expert, sizes."),
    ] = None,
    load: Annotated[str, typer.Option(help="even, uniform or skew: how rows spread.")] = "even",
    tune: Annotated[
        bool, typer.Option("--tune", help="Try every cut, keep the best for experts: tuned.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check each backend against float32, then time it beside the weight-streaming floor.

    Exit code 4 when a backend is wrong.
    """
    cases = list(_cases(model, ep, shapes, load))
    from epdecode.bench.expert_run import run_case
    from epdecode.bench.timing import measure_streams, require_cuda

    require_cuda()
    streams = measure_streams()
    lines: list[Line] = []
    for case in cases:
        lines += run_case(case, streams, tune)
        gc.collect()
    if as_json:
        typer.echo(json.dumps(document(lines, streams), indent=2, allow_nan=False))
    else:
        print_table(lines, streams)
    if not all(line.correct for line in lines):
        raise typer.Exit(Exit.WRONG_NUMBERS)


def _cases(model: str | None, ep: int, texts: list[str] | None, load: str) -> Iterator[ExpertCase]:
    from epdecode.bench.expert_cases import LOADS, ExpertCase

    if load not in LOADS:
        raise ConfigError(f"--load: got {load!r}, accepted: {', '.join(LOADS)}")
    wanted = [parse_shape(text) for text in texts or ()]
    if model:
        wanted += [_model_shape(model, ep, rows) for rows in MODEL_ROWS]
    for experts_, rows, hidden, size in wanted or SHAPES:
        shape = ExpertShape(experts=experts_, hidden=hidden, size=size)
        yield ExpertCase(shape, rows, load)


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """``E,rows,H,I`` -> four whole numbers, each above zero, sizes multiples of 128."""
    parts = text.split(",")
    if len(parts) != 4 or not all(part.strip().isdigit() and int(part) for part in parts):
        raise ConfigError(f"--shape: got {text!r}, accepted: E,rows,H,I such as 32,16,7168,2048")
    count, rows, hidden, size = (int(part) for part in parts)
    if hidden % 128 or size % 128:
        raise ConfigError(f"--shape: {text!r}: sizes must be multiples of 128 (FP8 weight blocks)")
    return count, rows, hidden, size


def _model_shape(model: str, ep: int, rows: int) -> tuple[int, int, int, int]:
    from epdecode.config.load import load_model

    found = load_model(model)
    if found.num_experts % ep:
        raise ConfigError(f"--ep: got {ep}, accepted: a divisor of {found.num_experts} experts")
    size = -(-found.expert_size // 128) * 128
    return found.num_experts // ep, rows, found.hidden, size
