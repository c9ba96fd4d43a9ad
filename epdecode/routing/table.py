"""Tables of expert load: how many tokens each expert of each layer got, as recorders write them.

.csv: a header with layer, expert and count (also layer_id, expert_id), a line per expert; or no
header, a line per layer, a column per expert. .json: a list of layers, each a list of counts, with
any further lists around it summed (steps, ranks); or such lists under ``logical_count`` or
``counts``; or a mapping of layer numbers to lists.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epdecode.errors import ConfigError

SUFFIXES = (".csv", ".json")
NESTED = ("logical_count", "counts")
MOST_LAYERS = 10_000
MOST_EXPERTS = 1 << 20

Counts = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LoadTable:
    """counts: float64 [layers, experts]; source: the file, for messages; open_ended: experts at the
    end that got nothing may be left out."""

    counts: Counts
    source: str
    open_ended: bool = False

    @property
    def num_rows(self) -> int:
        """Layers of the table."""
        return int(self.counts.shape[0])

    def digest(self) -> str:
        """The same table on every rank, or another."""
        return hashlib.sha256(self.counts.tobytes()).hexdigest()[:16]

    def row(self, row: int, num_experts: int) -> Counts:
        """One layer's counts. Raises ConfigError for another number of experts or an empty row."""
        counts = self.counts[row]
        found = len(counts)
        if found > num_experts or (found < num_experts and not self.open_ended):
            raise ConfigError(f"{self.source}: {found} experts; the model has {num_experts}")
        if not counts.sum() > 0:
            raise ConfigError(f"{self.source}: layer row {row} has no tokens at all")
        return np.pad(counts, (0, num_experts - found))


def read_load_table(path: Path) -> LoadTable:
    """The table of a file. Raises ConfigError naming what is wrong and where."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: got {path.suffix or 'no suffix'}; accepted: {SUFFIXES}")
    try:
        table = _read_csv(path) if path.suffix == ".csv" else _read_json(path)
    except (OSError, UnicodeDecodeError, csv.Error, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: no table of counts: {error}") from error
    if not (np.isfinite(table.counts).all() and (table.counts >= 0).all()):
        raise ConfigError(f"{path}: accepted: counts >= 0")
    return table


def _read_csv(path: Path) -> LoadTable:
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.reader(file) if line]
    if not lines:
        raise ValueError("the file is empty")
    header = [cell.strip().lower().removesuffix("_id") for cell in lines[0]]
    if {"layer", "expert", "count"} <= set(header):
        columns = [header.index(name) for name in ("layer", "expert", "count")]
        return _from_entries(path, ([line[c] for c in columns] for line in lines[1:]))
    return LoadTable(_rectangle([[float(cell) for cell in line] for line in lines]), str(path))


def _from_entries(path: Path, entries: Iterable[Sequence[str]]) -> LoadTable:
    """A table of (layer, expert, count); counts of the same expert add up (ranks, steps)."""
    read = [(int(layer), int(expert), float(count)) for layer, expert, count in entries]
    if not read:
        raise ValueError("a header without lines")
    layers, experts = {layer for layer, _, _ in read}, {expert for _, expert, _ in read}
    least = min(layers | experts)
    if least < 0 or max(layers) >= MOST_LAYERS or max(experts) >= MOST_EXPERTS:
        raise ValueError(f"layers 0 to {MOST_LAYERS - 1} and experts 0 to {MOST_EXPERTS - 1}")
    counts = np.zeros((max(layers) + 1, max(experts) + 1))
    for layer, expert, count in read:
        counts[layer, expert] += count
    return LoadTable(counts, str(path), open_ended=True)


def _read_json(path: Path) -> LoadTable:
    found: Any = json.loads(path.read_text(encoding="utf-8"))
    for name in NESTED:
        if isinstance(found, dict) and name in found:
            found = found[name]
    if isinstance(found, dict):
        numbers = {int(key): row for key, row in found.items()}
        if not numbers or min(numbers) < 0 or max(numbers) >= MOST_LAYERS:
            raise ValueError("layer numbers from 0")
        width = len(next(iter(numbers.values())))
        found = [numbers.get(number, [0] * width) for number in range(max(numbers) + 1)]
    counts = np.array(found, dtype=np.float64)
    while counts.ndim > 2:
        counts = counts.sum(0)
    return LoadTable(_rectangle(counts), str(path))


def _rectangle(rows: Any) -> Counts:
    counts = np.array(rows, dtype=np.float64)
    if counts.ndim != 2 or 0 in counts.shape:
        raise ValueError(f"got shape {list(counts.shape)}, accepted: [layers, experts]")
    return counts
