"""The result as text: strict JSON, its schema, and the one line a run ends with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from epdecode.errors import ConfigError, Exit
from epdecode.result import Cause, Floor, Result

EXIT_OF = {
    "passed": Exit.OK,
    "wrong": Exit.WRONG_NUMBERS,
    "degraded": Exit.RANK_LOST,
    "interrupted": Exit.PREEMPTED,
    "failed": Exit.BUG,
}
"""Exit code of a status when nothing more exact is known."""


SCHEMA_FILE = Path(__file__).with_name("schema.json")


def exit_of(result: Result) -> Exit:
    """The exit code of a run that came to its end."""
    if result.non_finite and any(result.non_finite.counts.values()):
        return Exit.NON_FINITE
    return EXIT_OF[result.status]


def to_json(result: Result) -> str:
    """Strict JSON, two spaces of indent, final newline.

    Raises ValueError naming the path of a NaN or infinite figure, of a value that JSON does not
    have, or of a speed in a result of ranks that shared a GPU.
    """
    if result.method.shared_gpu and _speeds(result):
        raise ValueError(
            f"result.{_speeds(result)[0]}: ranks shared a GPU, so no speed may be reported "
            f"(withhold_speed drops it)"
        )
    document = asdict(result)
    for path, value in _leaves(document, "result"):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path}: {value} has no place in JSON")
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"{path}: {type(value).__name__} has no place in JSON")
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def from_json(text: str, where: str = "result.json") -> Result:
    """Read a result back, every field checked. Raises ConfigError naming where and the field."""
    try:
        return TypeAdapter(Result).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "(document)"
        raise ConfigError(
            f"{where}: not an epdecode.result/1 document: {place}: {first['msg']} "
            f"({error.error_count()} in all)"
        ) from error


def schema_json() -> str:
    """JSON Schema of the document, as shipped beside this module."""
    schema = TypeAdapter(Result).json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def summary_line(result: Result, path: str | Path | None, exit_code: int | None = None) -> str:
    """The last line of stdout: one JSON object, no line break.

    path: where result.json lies, None when it could not be saved. exit_code: where the status does
    not settle it. Speeds are null unless the run passed on GPUs of its own (or a CPU).
    """
    timing, method = result.timing, result.method
    counts = result.status == "passed" and not method.shared_gpu
    floor = result.layer_floor if counts else None
    summary = {
        "status": result.status,
        "result": None if path is None else str(path),
        "exit_code": int(EXIT_OF[result.status] if exit_code is None else exit_code),
        "name": result.name,
        "step_us_p50": timing.step.p50 if counts and timing else None,
        "layer_us_p50": timing.layer.p50 if counts and timing else None,
        "tokens_per_s": result.throughput.tokens_per_s if counts and result.throughput else None,
        "fraction_of_floor": floor.fraction if floor else None,
        "world_size": method.world_size,
        "layers": method.layers,
        "tokens_per_rank": method.tokens_per_rank,
        "transport": method.transport,
        "experts": method.experts,
        "graph": method.graph,
        "shared_gpu": method.shared_gpu,
        "gpu": result.provenance.gpu,
        "worst_error": result.verification.worst_error if result.verification else None,
        "tolerance": result.verification.tolerance if result.verification else None,
        "cause": asdict(result.cause) if result.cause else None,
    }
    return json.dumps(summary, allow_nan=False)


def failure_line(exit_code: int, cause: Cause, run_dir: str | Path | None) -> str:
    """The last line of stdout of a run that has no result."""
    summary = {
        "status": "failed",
        "result": None,
        "exit_code": int(exit_code),
        "run_dir": None if run_dir is None else str(run_dir),
        "cause": asdict(cause),
    }
    return json.dumps(summary, allow_nan=False)


def withhold_speed(result: Result) -> Result:
    """The same result without any figure that could be taken for a speed."""
    return replace(
        result,
        timing=None,
        throughput=None,
        layer_floor=_unmeasured(result.layer_floor) if result.layer_floor else None,
        floors={stage: _unmeasured(floor) for stage, floor in result.floors.items()},
    )


def _unmeasured(floor: Floor) -> Floor:
    return replace(floor, fraction=None)


def _speeds(result: Result) -> list[str]:
    floors = {"layer_floor": result.layer_floor} if result.layer_floor else {}
    floors |= {f"floors.{stage}": floor for stage, floor in result.floors.items()}
    found = [name for name in ("timing", "throughput") if getattr(result, name)]
    return found + [f"{name}.fraction" for name, floor in floors.items() if floor.fraction]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path}: key {key!r} is not a string")
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value
