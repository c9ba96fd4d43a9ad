"""`epdecode bench kernels`: every kernel checked, timed hot and cold, beside floor and plain torch.

Correctness comes first, in the same call: a wrong kernel gets no time. Without a GPU only the
check runs, on small shapes, under the interpreter.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from epdecode.bench.kernel_report import Line, document, print_table
from epdecode.bench.kernel_shapes import default_shapes, shrunk
from epdecode.errors import ConfigError, Exit, nearest

if TYPE_CHECKING:
    from epdecode.bench.cases import Case
    from epdecode.bench.kernel_shapes import Shape
    from epdecode.bench.timing import Streams


def kernels(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="An op's name; may be repeated.")
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shapes",
            help="Own shapes for the one --only op, as E=32,M=1024,I=2048,live=512,load=skew.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check each kernel against its plain twin, then time it: hot, cold, floor, plain torch.

    Exit code 4 when a kernel is wrong.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        # Read when triton decorates a kernel, so before any kernel module is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    from epdecode.bench.timing import measure_streams

    cases = list(_cases(only, shapes, small=not on_gpu))
    streams = measure_streams() if on_gpu else None
    lines = []
    for case in cases:
        lines.append(_run(case, streams))
        gc.collect()
    if as_json:
        typer.echo(json.dumps(document(lines, streams), indent=2, allow_nan=False))
    else:
        print_table(lines, streams)
    if not all(line.correct for line in lines):
        raise typer.Exit(Exit.WRONG_NUMBERS)


def _cases(only: list[str] | None, shapes: list[str] | None, small: bool) -> Iterator[Case]:
    from epdecode.bench.kernel_cases import CASES

    for op in only or ():
        if op not in CASES:
            raise ConfigError(
                f"--only: got {op!r}, accepted: {', '.join(CASES)}{nearest(op, CASES)}"
            )
    if shapes and len(only or ()) != 1:
        raise ConfigError("--shapes: needs exactly one --only NAME to say which op they are for")
    wanted: Iterable[tuple[str, Shape]] = default_shapes()
    if shapes and only:
        wanted = [(only[0], parse_shape(text)) for text in shapes]
    seen = set()
    for op, shape in wanted:
        shape = shrunk(shape) if small else shape
        key = (op, str(shape))
        if (only and op not in only) or key in seen:
            continue
        seen.add(key)
        try:
            case = CASES[op](shape)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"--shapes: {op} with {dict(shape)}: {error!r}") from error
        yield case


def parse_shape(text: str) -> dict[str, int | str]:
    """``E=32,M=1024,load=skew`` -> a mapping, whole numbers as int."""
    shape: dict[str, int | str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not (key and equals and value):
            raise ConfigError(f"--shapes: {part!r} in {text!r} is not KEY=VALUE")
        shape[key] = int(value) if value.isdigit() else value
    return shape


def _run(case: Case, streams: Streams | None) -> Line:
    """Check, then time where there is a GPU."""
    import torch

    from epdecode.bench import timing

    if streams is None:
        difference = case.build(torch.device("cpu"), 1).difference()
        return Line(case.op, dict(case.shape), case.num_bytes, not difference, difference)
    torch.cuda.empty_cache()
    built = case.build(torch.device("cuda"), timing.cold_sets(case.num_bytes))
    difference = built.difference()
    if difference:
        return Line(case.op, dict(case.shape), case.num_bytes, False, difference)
    hot = timing.hot_us(built.calls[0]).p50
    cold = timing.cold_us(built.calls).p50
    plain = timing.graph_us([built.plain], replays=10).p50
    padded = timing.graph_us([built.padded], replays=5).p50 if built.padded else None
    floor = case.num_bytes / streams.read_tb_s / 1e6
    return Line(
        case.op,
        dict(case.shape),
        case.num_bytes,
        True,
        "",
        hot_us=hot,
        cold_us=cold,
        floor_us=floor,
        share_hot=floor / hot,
        share_cold=floor / cold,
        plain_us=plain,
        padded_plain_us=padded,
        speedup=plain / hot,
    )
