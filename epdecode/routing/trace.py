"""Recorded routes: which experts each token of each layer went to, as engines can record them.

An array [tokens, moe_layers, top_k] of logical expert ids, -1 = no expert, in a .npy, .npz or
.safetensors file. Read without torch; a .npy is mapped, so that a long trace costs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from epdecode.errors import ConfigError

NAME = "routed_experts"
"""The array's name in files that hold several."""
SUFFIXES = (".npy", ".npz", ".safetensors")
DIGEST_BYTES = 64 << 20
CHUNK = 1 << 16
"""Tokens checked at a time: a mapped trace may be larger than memory."""

Ids = NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """ids: integers [tokens, layers, top_k]; source: the file, for messages."""

    ids: Ids
    source: str

    @property
    def num_tokens(self) -> int:
        """Recorded tokens."""
        return int(self.ids.shape[0])

    @property
    def num_rows(self) -> int:
        """Recorded layers."""
        return int(self.ids.shape[1])

    def counts(self, num_experts: int) -> NDArray[np.float64]:
        """float64 [layers, num_experts]: how often each expert was chosen."""
        rows = [
            np.bincount(self.ids[:, row].astype(np.int64).ravel() + 1, minlength=num_experts + 1)
            for row in range(self.num_rows)
        ]
        return np.stack(rows)[:, 1:].astype(np.float64)

    def tokens(self, first: int, count: int) -> Ids:
        """[count, layers, top_k] from token ``first`` on, beginning again at the end."""
        if self.num_tokens == 0:
            return self.ids[:0]
        if first + count <= self.num_tokens:
            return self.ids[first : first + count]
        return self.ids[np.arange(first, first + count) % self.num_tokens]

    def digest(self) -> str:
        """Of shape, dtype and the first 64 MiB: the same file on every rank, or another."""
        head = np.ascontiguousarray(self.ids[: max(1, DIGEST_BYTES // max(1, self._token_bytes))])
        text = f"{self.ids.shape} {self.ids.dtype} "
        return hashlib.sha256(text.encode() + head.tobytes()).hexdigest()[:16]

    @property
    def _token_bytes(self) -> int:
        return int(np.prod(self.ids.shape[1:])) * self.ids.itemsize


def read_trace(path: Path) -> Trace:
    """The trace of a file. Raises ConfigError for what is no array of expert ids."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: got {path.suffix or 'no suffix'}; accepted: {SUFFIXES}")
    try:
        found = _load(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read as {path.suffix}: {error}") from error
    if not np.issubdtype(found.dtype, np.integer) or found.ndim != 3 or 0 in found.shape[1:]:
        raise ConfigError(
            f"{path}: got {found.dtype} {list(found.shape)}; accepted: integers [tokens, "
            "moe_layers, top_k]"
        )
    return Trace(found, str(path))


def write_trace(path: Path, ids: Ids, facts: Mapping[str, str]) -> None:
    """Write ``ids`` as .safetensors in the smallest signed type that holds them, with facts."""
    most = int(ids.max(initial=0))
    kind = next(t for t in (np.int8, np.int16, np.int32, np.int64) if most <= np.iinfo(t).max)
    save_file({NAME: np.ascontiguousarray(ids.astype(kind))}, path, metadata=dict(facts))


def check_trace(trace: Trace, top_k: int, num_experts: int) -> None:
    """Raise ConfigError for a trace of another model: its top-k, an id out of range, or a token
    that chooses an expert twice."""
    if trace.ids.shape[2] != top_k:
        got = trace.ids.shape[2]
        raise ConfigError(f"{trace.source}: top_k is {got}; the model has {top_k}")
    if trace.num_tokens == 0:
        raise ConfigError(f"{trace.source}: holds no tokens")
    for first in range(0, trace.num_tokens, CHUNK):
        ids = np.asarray(trace.ids[first : first + CHUNK], dtype=np.int64)
        outside = (ids < -1) | (ids >= num_experts)
        _refuse(trace, first, outside, ids, f"; accepted: -1 to {num_experts - 1}")
        ordered = np.sort(ids, axis=2)[..., ::-1]
        twice = (ordered[..., :-1] == ordered[..., 1:]) & (ordered[..., 1:] >= 0)
        _refuse(trace, first, twice, ordered, " twice; accepted: distinct experts")


def _refuse(trace: Trace, first: int, wrong: NDArray[np.bool_], ids: Ids, what: str) -> None:
    if wrong.any():
        token, row, slot = np.argwhere(wrong)[0]
        got = ids[token, row, slot]
        where = f"token {first + token}, layer row {row}"
        raise ConfigError(f"{trace.source}: {where} has expert {got}{what}")


def need_tokens(trace: Trace, needed: int, wrap: bool) -> None:
    """Raise ConfigError when a run takes more tokens than were recorded."""
    if not wrap and needed > trace.num_tokens:
        raise ConfigError(
            f"{trace.source}: {trace.num_tokens} tokens; the run takes {needed}: lower run.steps "
            "or batch.tokens_per_rank, or set routing.wrap: true to begin again at the end"
        )


def _load(path: Path) -> Ids:
    found: Ids
    if path.suffix == ".npy":
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        return found
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            found = arrays[_only(path, list(arrays))]
            return found
    tensors = load_file(path)
    found = tensors[_only(path, list(tensors))]
    return found


def _only(path: Path, names: list[str]) -> str:
    """The array of that name, or the only one."""
    if NAME in names or len(names) == 1:
        return NAME if NAME in names else names[0]
    raise ValueError(f"arrays {', '.join(sorted(names)) or 'none'}; accepted: one, or {NAME}")
