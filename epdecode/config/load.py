"""Config and model files -> frozen dataclasses, or one ConfigError with every mistake in them.

``load_config`` and ``load_model`` read; ``resolved_yaml`` and ``digest`` write. No torch here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from epdecode.config import Config
from epdecode.config.check import check
from epdecode.config.reader import Node, Place, Problem, read_text, read_yaml, scalar
from epdecode.config.rules import config_rules, model_rules
from epdecode.errors import ConfigError, nearest
from epdecode.models import ModelShape
from epdecode.models.hf import cached_config, is_hub_name, load_hf

DEFAULT = "cpu-tiny"
MAX_SHOWN = 40

T = TypeVar("T")


def configs_dir() -> Path:
    """The presets: inside an installed package, next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_preset(name_or_path: str | Path | None = None) -> Path:
    """A config file: an existing path, or the name of a preset (None: cpu-tiny)."""
    text = str(name_or_path or DEFAULT)
    for path in (Path(text), configs_dir() / text, configs_dir() / f"{text}.yaml"):
        if _is_file(path):
            return path
    names = sorted(path.stem for path in configs_dir().glob("*.yaml"))
    raise ConfigError(
        f"config {text!r}: no such file or preset; presets: {', '.join(names)}"
        f"{nearest(Path(text).stem, names)}"
    )


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of a file or preset with ``a.b=value`` overrides; the last of equal ones wins.

    Raises ConfigError with one line for every mistake: place, key, got, accepted, nearest name.
    """
    file = find_preset(path)
    root, problems = _read(file)
    for text in overrides:
        problems += _override(root, text)
    config, more = check(Config, root, config_rules)
    return _done(config, problems + more)


def load_model(name: str, near: str | Path | None = None) -> ModelShape:
    """The shape of ``config.model``, found as ``find_model`` says."""
    file = find_model(name, near)
    if file.suffix == ".json":
        return load_hf(file)
    root, problems = _read(file)
    model, more = check(ModelShape, root, model_rules)
    return _done(model, problems + more)


def model_names() -> list[str]:
    """The shapes that come with the package."""
    return sorted(path.stem for path in (configs_dir() / "models").glob("*.yaml"))


def find_model(name: str, near: str | Path | None = None) -> Path:
    """The file behind ``config.model``: a shape file or a Hugging Face config.json.

    In this order: a name in configs/models; the path of a shape file, of a Hugging Face folder or
    of its config.json, beside ``near`` (the config's path) and then from here; org/name in the
    local Hub cache. ConfigError lists what was tried.
    """
    shipped = configs_dir() / "models" / f"{name}.yaml"
    if "/" not in name and _is_file(shipped):
        return shipped
    tried = [*([Path(near).parent / name] if near else []), Path(name)]
    for path in tried:
        for file in (path, path / "config.json"):
            if _is_file(file):
                return file
    looked = f"looked at {', '.join(str(path) for path in tried)}"
    if is_hub_name(name) and not any(map(_exists, tried)):
        return cached_config(name, looked)
    raise ConfigError(
        f"model: got {name!r}, accepted: {', '.join(model_names())}, the path of a shape file or "
        f"of a folder with a config.json, or org/name{nearest(name, model_names())} ({looked})"
    )


def find_beside(path: str, near: str | Path | None, key: str) -> Path:
    """The file or folder a key names, beside ``near`` (the config's path) or from here."""
    tried = [*([Path(near).parent / path] if near else []), Path(path)]
    for found in tried:
        if _exists(found):
            return found
    looked = ", ".join(dict.fromkeys(str(one.absolute()) for one in tried))
    raise ConfigError(f"{key}: got {path!r}, accepted: an existing path (looked at {looked})")


def find_checkpoint(config: Config, near: str | Path | None = None) -> Path:
    """The folder that weights.source = checkpoint reads: weights.path, or the model's own."""
    if config.weights.path is not None:
        return find_beside(config.weights.path, near, "weights.path")
    found = find_model(config.model, near)
    if found.suffix != ".json":
        raise ConfigError(
            f"weights.path: null, and model {config.model!r} is a shape file without weights; "
            "accepted: the folder of a checkpoint"
        )
    return found.parent


def resolved_yaml(config: Config, near: str | Path | None = None) -> str:
    """The whole config as YAML: every default written out, runs again to the same digest.

    Relative paths become absolute (``near``: the config's path), so that the text can move.
    """
    plain = dataclasses.asdict(config)
    named = [(plain, "model")] if config.model not in model_names() else []
    named += [(plain["weights"], "path"), (plain["routing"], "path"), (plain["experts"], "load")]
    for section, key in named:
        if (path := section[key]) is None:
            continue
        paths = [*([Path(near).parent / path] if near else []), Path(path)]
        if found := next(filter(_exists, paths), None):
            section[key] = os.path.abspath(found)
    return yaml.dump(_canonical(plain), Dumper=_Dumper, sort_keys=False, width=100)


def digest(config: Config, model: ModelShape) -> str:
    """sha256 (hex) of config and model shape: equal when a run would do the same.

    Left out: where the shape was read from, and what it calls itself and its source; of weights
    and recorded routes only the file's or folder's name counts, not where it lies.
    """
    plain = {"config": dataclasses.asdict(config), "model": dataclasses.asdict(model)}
    del plain["config"]["model"], plain["model"]["source"], plain["model"]["name"]
    for section, key in (("weights", "path"), ("routing", "path"), ("experts", "load")):
        if path := plain["config"][section][key]:
            plain["config"][section][key] = Path(path).name
    text = json.dumps(_canonical(plain), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class _Dumper(yaml.SafeDumper):
    """Lists on one line; text quoted where the strict reader would take it for something else."""


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if scalar(text, plain=True) == text else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_str)


def _canonical(value: Any) -> Any:
    """``value`` with lists for tuples, and 2 for 2.0: a default and its written form are one."""
    if isinstance(value, float) and value.is_integer() and value < 1e15:
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return value


def _is_file(path: Path) -> bool:
    return _exists(path) and path.is_file()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _read(file: Path) -> tuple[Node, list[Problem]]:
    """The tree of a file whose top level is a mapping; without one there is nothing to check."""
    place = Place(str(file), 1)
    root, problems = read_yaml(read_text(file), place)
    if root is None or not isinstance(root.value, dict):
        if not problems:
            problems = [Problem(place, "the file holds no keys; accepted: `key: value` lines")]
        raise _error(problems)
    return root, problems


def _override(root: Node, text: str) -> list[Problem]:
    """Set ``a.b`` of ``a.b=value`` in the tree."""
    place = Place(f"override {text[:80]!r}")
    dotted, equals, value = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        return [Problem(place, "accepted: key=value or section.key=value")]
    node, problems = read_yaml(value, place)
    if node is None and problems:
        return problems
    target = root
    for key in keys[:-1]:
        assert isinstance(target.value, dict), "sections are made below"
        inner = target.value.get(key)
        if inner is None or not isinstance(inner.value, dict):
            inner = target.value[key] = Node({}, place)
        target = inner
    assert isinstance(target.value, dict), "sections are made above"
    target.value[keys[-1]] = node or Node(None, place)
    return problems


def _done(value: T | None, problems: list[Problem]) -> T:
    if problems or value is None:
        raise _error(problems)
    return value


def _error(problems: Iterable[Problem]) -> ConfigError:
    ordered = sorted(set(problems), key=lambda problem: (problem.place.line == 0, problem))
    lines = [str(problem) for problem in ordered]
    shown = lines[:MAX_SHOWN]
    if len(lines) > MAX_SHOWN:
        shown.append("... and more")
    return ConfigError("\n".join(shown))
