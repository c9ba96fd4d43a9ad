"""Which expert kernel for how many rows: rules measured on an H200, and tables tuned per machine.

A tuned table is one JSON file per GPU name and library versions in the user's cache folder,
written by `epdecode bench experts --tune` and read when the experts are built.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from epdecode.errors import ConfigError
from epdecode.result.save import atomic_write

SCHEMA = "epdecode.expert_choice/2"
Backend = Literal["triton_gemm", "deepgemm"]
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
"""Rows per expert that a table has an entry for; a load takes the first that is not below it."""


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
    parts: int = 1
    stages: int = 6
    narrow: bool = True
    splits: int = 1


Table = Mapping[str, Mapping[int, Choice]]
"""Shape key -> rows -> choice."""


def bucket(rows: int) -> int:
    """The entry of ROWS that serves ``rows`` rows per expert."""
    return next((entry for entry in ROWS if rows <= entry), ROWS[-1])


def default_choice(shape: ExpertShape, rows: int) -> Choice:
    """The rule for a shape that no table has, from one H200 (docs/expert_chain.md).

    Above 64 rows tiles of 64 read the weights more than once: DeepGEMM's are larger.
    """
    rows = bucket(rows)
    if rows <= 16:
        return Choice(tokens=16, stages=6)
    if rows <= 32:
        return Choice(tokens=32, stages=5)
    if rows <= 64 and shape.experts >= 16:
        return Choice(tokens=64, stages=4)
    backend: Backend = "triton_gemm" if rows <= 64 else "deepgemm"
    return Choice(backend=backend, tokens=64, stages=5, narrow=False)


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
