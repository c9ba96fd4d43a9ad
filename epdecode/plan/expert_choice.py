"""Which expert kernel for how many rows: rules measured on an H200, and tables tuned per machine.

A tuned table is one JSON file per GPU name and library versions in the user's cache folder,
written by `epdecode bench experts --tune` and read when the experts are built.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from epdecode.errors import ConfigError
from epdecode.result.save import atomic_write

SCHEMA = "epdecode.expert_choice/3"
Backend = Literal["triton_gemm", "deepgemm"]
Spread = Literal["even", "drawn", "skewed"]
"""How rows fall on experts: the same on each, by chance, or more on some."""
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
"""Rows that a table has an entry for; a load takes the first that is not below its fuller experts'.
"""

MOST_STAGES = {16: 6, 32: 5, 64: 5, 128: 4}
"""Rows of a tile that triton_gemm can have -> steps of weights that fit beside them."""
SPLITS = (1, 2, 4, 8)
"""Parts of K that a gate-up tile may have."""
_PAIRS = 66
_LONG_K = 7168
_SMALL = 16 * 2048 * 768
_RIVALRY = {1: 16, 2: 32}
"""Few experts -> rows up to which triton_gemm is the faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """What a choice depends on beside the rows: local experts, hidden and expert size."""

    experts: int
    hidden: int
    size: int

    @property
    def key(self) -> str:
        """The shape's name in a table."""
        return f"E{self.experts}-H{self.hidden}-I{self.size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A backend, and how triton_gemm cuts its work: see ChainTile."""

    backend: Backend = "triton_gemm"
    tokens: int = 16
    stages: int = 6
    narrow: bool = True
    splits: int = 1


Table = Mapping[str, Mapping[int, Choice]]
"""Shape key -> rows -> choice."""


def fuller(rows: int, spread: Spread) -> int:
    """Rows that few experts exceed where the mean is ``rows``: what a tile should hold.

    Weights of a second tile are read once more, while an empty half of a tile costs next to
    nothing (docs/expert_chain.md). By chance, counts are about Poisson: the mean and two standard
    deviations. Skewed: four times the mean, up to the largest tile.
    """
    if spread == "even":
        return rows
    drawn = math.ceil(rows + 2 * math.sqrt(rows))
    return drawn if spread == "drawn" else max(drawn, min(4 * rows, max(MOST_STAGES)))


def bucket(rows: int) -> int:
    """The entry of ROWS that serves ``rows`` rows per expert."""
    return next((entry for entry in ROWS if rows <= entry), ROWS[-1])


def default_choice(shape: ExpertShape, rows: int) -> Choice:
    """The rule for a shape that no table has, from two H200s (docs/expert_chain.md).

    Above 128 rows the largest tiles read the weights more than once: DeepGEMM's kernels then, and
    from fewer rows on for one expert or two.
    """
    rows = bucket(rows)
    most = _RIVALRY.get(shape.experts, max(MOST_STAGES))
    backend: Backend = "deepgemm" if rows > most else "triton_gemm"
    cut = _default_cut(shape, rows)
    splits = splits_for(shape, rows, cut.tokens) if shape.hidden >= _LONG_K else 1
    return replace(cut, backend=backend, splits=splits)


def _default_cut(shape: ExpertShape, rows: int) -> Choice:
    small = shape.experts * shape.hidden * shape.size <= _SMALL
    if rows <= 32:
        tokens = 16 if rows <= 16 else 32
        return Choice(tokens=tokens, stages=3 if small else MOST_STAGES[tokens])
    if rows <= 64 or shape.experts <= 4:
        return Choice(tokens=64, stages=3 if small else MOST_STAGES[64], narrow=False)
    return Choice(tokens=128, stages=MOST_STAGES[128], narrow=False)


def splits_for(shape: ExpertShape, rows: int, tokens: int) -> int:
    """Parts of K with which gate-up tiles fill an H200's pairs of SMs once, and no more than once.

    The two SMs of a pair share a way to L2; one each loads nearly as fast as both, and half the
    parts pass half the sums on.
    """
    tiles = shape.experts * (shape.size // 128) * -(-rows // tokens)
    fitting = [n for n in SPLITS if tiles * n <= _PAIRS and shape.hidden % (128 * n) == 0]
    return max(fitting, default=1)


def choose(shape: ExpertShape, rows: int, table: Table) -> Choice:
    """The tuned choice where the table has one for this shape and load, else the rule's."""
    tuned = table.get(shape.key, {}).get(bucket(rows))
    return tuned or default_choice(shape, rows)


def table_path(gpu: str, versions: Mapping[str, str], env: Mapping[str, str] = os.environ) -> Path:
    """Where this machine's table is or would be."""
    home = Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "/") / ".cache") / "epdecode"
    text = "\n".join(f"{name}={value}" for name, value in sorted(versions.items()))
    name = f"{gpu.lower().replace(' ', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return Path(env.get("EPDECODE_CACHE_DIR") or home) / "experts" / f"{name}.json"


def load_table(path: Path) -> dict[str, dict[int, Choice]]:
    """The table at ``path``, empty where there is none.

    Raises ConfigError for a file that is not one: a tuned machine must not fall back silently.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; delete it or tune again") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"{path}: schema is {schema!r}, accepted: {SCHEMA}; tune again")
    names = {field.name for field in fields(Choice)}
    try:
        return {
            key: {
                int(rows): Choice(**{name: entry[name] for name in names})
                for rows, entry in entries.items()
            }
            for key, entries in document["choices"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a table of choices: {error!r}; tune again") from error


def save_table(path: Path, table: Table) -> None:
    """Write ``table``, whole or not at all."""
    choices = {
        key: {str(rows): asdict(choice) for rows, choice in entries.items()}
        for key, entries in table.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps({"schema": SCHEMA, "choices": choices}, indent=1) + "\n")
