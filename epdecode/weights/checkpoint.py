"""A Hugging Face folder of safetensors files: what is in it, checked before anything is allocated.

Only config.json, the index and the files' headers are read here; a tensor is read when asked for.
Other formats, pickled ones above all, are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from epdecode.errors import ConfigError
from epdecode.models import ModelShape
from epdecode.models.hf import load_hf, read_architecture
from epdecode.weights.layout import LAYOUTS, PREFIXES, LayerKeys, Layout, Wanted

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHOWN = 12


class Checkpoint:
    """An opened folder. Files stay mapped, so that ranks of a node share the pages they read."""

    def __init__(self, folder: Path) -> None:
        config = folder / "config.json"
        if not config.is_file():
            raise ConfigError(
                f"weights: no {config}; accepted: a folder with config.json and *.safetensors, as "
                f"`hf download ORG/NAME --local-dir {folder}` makes it"
            )
        self.folder = folder
        self.shape: ModelShape = load_hf(config)
        self._layout: Layout = LAYOUTS[read_architecture(config)]
        self._files = _files(folder)
        self._opened: dict[str, Any] = {}
        self._prefix = next(
            (p for p in PREFIXES if any(key.startswith(f"{p}layers.") for key in self._files)),
            PREFIXES[0],
        )

    def layer(self, number: int) -> LayerKeys:
        """The keys of the model's layer ``number``."""
        return LayerKeys(self._layout, self._prefix, number)

    def keys_below(self, prefix: str) -> set[str]:
        """All keys that begin with ``prefix``."""
        return {key for key in self._files if key.startswith(prefix)}

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def header(self, key: str) -> tuple[str, tuple[int, ...]]:
        """dtype (safetensors' name) and shape of a tensor, from its file's header."""
        piece = self._slice(key)
        return piece.get_dtype(), tuple(piece.get_shape())

    def tensor(self, key: str) -> torch.Tensor:
        """A whole tensor on the CPU, mapped from the file: its pages are read when touched."""
        found: torch.Tensor = self._file(key).get_tensor(key)
        return found

    def part(self, key: str, index: int) -> torch.Tensor:
        """``tensor(key)[index]``, of which only that part is read."""
        found: torch.Tensor = self._slice(key)[index]
        return found

    def close(self) -> None:
        """Unmap the files; tensors that were read stay valid."""
        self._opened.clear()

    def _slice(self, key: str) -> Any:
        try:
            return self._file(key).get_slice(key)
        except SafetensorError as error:
            name = self._files[key]
            raise ConfigError(
                f"weights: {self.folder / INDEX} says that {key} is in {name}, which does not hold "
                f"it ({error})"
            ) from error

    def _file(self, key: str) -> Any:
        name = self._files[key]
        if name not in self._opened:
            path = self.folder / name
            try:
                self._opened[name] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError as error:
                raise ConfigError(f"weights: no {path}, which {INDEX} names for {key}") from error
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"weights: {path} cannot be read: {error}") from error
        return self._opened[name]


def _files(folder: Path) -> dict[str, str]:
    """Key -> name of the file that holds it."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        return _read_index(index)
    if not single.is_file():
        raise ConfigError(
            f"weights: neither {INDEX} nor {SINGLE} in {folder}; accepted: safetensors files "
            "(pickled .bin and .pt files are never read)"
        )
    try:
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SINGLE)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"weights: {single} cannot be read: {error}") from error


def _read_index(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"weights: {index} is no index with a weight_map: {error!r}") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in found.values()
    ):
        raise ConfigError(f"weights: {index}: accepted: names of files beside it, one per key")
    return found


def check_layers(checkpoint: Checkpoint, model: ModelShape, numbers: Sequence[int]) -> None:
    """Compare the folder with the model, and every tensor of the layers with what it must be.

    The same on every rank, whichever experts it holds. Raises one ConfigError that lists missing,
    unknown and misshapen tensors; tensors outside the layers' MoE blocks are nobody's business.
    """
    problems = list(_unlike(checkpoint.shape, model))
    if not problems:
        for number in numbers:
            problems += _layer_problems(checkpoint, checkpoint.layer(number))
    if problems:
        shown = [f"  {problem}" for problem in problems[:MAX_SHOWN]]
        if len(problems) > MAX_SHOWN:
            shown.append(f"  ... and {len(problems) - MAX_SHOWN} more")
        raise ConfigError("\n".join([f"weights: {checkpoint.folder} does not fit:", *shown]))


def _unlike(own: ModelShape, model: ModelShape) -> Iterator[str]:
    """Fields in which the folder's config.json and the run's model differ."""
    fields = ["hidden", "expert_size", "num_experts", "top_k", "num_shared_experts", "router"]
    if model.moe_layers:
        fields.append("moe_layers")
    for field in fields:
        theirs, ours = getattr(own, field), getattr(model, field)
        if theirs != ours:
            yield f"config.json: {field} is {theirs}; model {model.name} has {ours}"


def _layer_problems(checkpoint: Checkpoint, keys: LayerKeys) -> Iterator[str]:
    wanted = keys.wanted(checkpoint.shape)
    for key, tensor in wanted.items():
        if key not in checkpoint:
            yield f"{key}: missing; expected {_shown(tensor)}"
            continue
        dtype, shape = checkpoint.header(key)
        if shape != tensor.shape or dtype not in tensor.dtypes:
            yield f"{key}: got {dtype} {list(shape)}; expected {_shown(tensor)}"
    for key in sorted(checkpoint.keys_below(keys.block) - set(wanted) - keys.ignored):
        yield f"{key}: unknown; nothing of the layer would read it"


def _shown(tensor: Wanted) -> str:
    return f"{' or '.join(tensor.dtypes)} {list(tensor.shape)}"
