"""A tree of nodes -> a validated dataclass, and a line for everything that does not fit.

Unknown keys are found here, types and bounds by pydantic in strict JSON mode (true is no int, an
int is a float, a list is a tuple), values against each other by the rules that are handed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from itertools import islice
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from epdecode.config.bounds import (
    accepts,
    describe,
    dotted_keys,
    hints,
    item_type,
    literals,
    section_of,
)
from epdecode.config.reader import Node, Place, Problem, show_key
from epdecode.config.rules import Breach
from epdecode.errors import nearest

# More are never shown, and looking for the nearest names of 100,000 would take minutes.
MAX_UNKNOWN = 1000

T = TypeVar("T")
Path = tuple[str | int, ...]
Rules = Callable[[Any], Iterator[Breach]]


def check(cls: type[T], root: Node, rules: Rules) -> tuple[T | None, list[Problem]]:
    """The dataclass and every mistake in ``root``, a mapping node.

    With mistakes the value is what could be made of the rest, or None.
    """
    unknown = _unknown_keys(cls, root, (), set(dotted_keys(cls)))
    problems = list(islice(unknown, MAX_UNKNOWN))
    bad: set[Path] = set()
    data = _plain(root, cls, bad)
    value, failures = _validate(cls, data)
    for path, missing in sorted(failures.items(), key=str):
        problems.append(_problem(cls, root, path, missing))
        bad.add(path)
    if failures:
        value, _ = _validate(cls, _plain(root, cls, bad))
    if value is not None:
        problems += _breaches(root, value, rules, {_dotted(path) for path in bad})
    return value, problems


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _validate(cls: type[T], data: Any) -> tuple[T | None, dict[Path, bool]]:
    """The value, or the path of each failure (True: a required key is missing)."""
    try:
        value: T = _adapter(cast(Hashable, cls)).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        return None, {_real_path(cls, item["loc"]): item["type"] == "missing" for item in found}
    return value, {}


def _real_path(cls: type, loc: Path) -> Path:
    """pydantic's location without the union members it adds."""
    kind: Any = cls
    path: list[str | int] = []
    for step in loc:
        section = section_of(kind)
        if section and isinstance(step, str) and step in hints(section):
            kind = hints(section)[step]
        elif isinstance(step, int) and item_type(kind) is not None:
            kind = item_type(kind)
        elif step in ("function-after", "function-before"):
            continue
        else:
            break
        path.append(step)
    return tuple(path)


def _unknown_keys(cls: type, node: Node, path: Path, every: set[str]) -> Iterator[Problem]:
    """A problem for each key no field has, at any depth, with the nearest one that exists."""
    if not isinstance(node.value, dict):
        return
    known = hints(cls)
    for key, inner in node.value.items():
        here = (*path, key)
        section = section_of(known[key]) if key in known else None
        if key not in known:
            similar = nearest(key, known) or _elsewhere(key, every)
            text = f"{_dotted(here)}: unknown key; accepted: {', '.join(known)}{similar}"
            yield Problem(inner.place, text)
        elif section:
            yield from _unknown_keys(section, inner, here, every)


def _elsewhere(key: str, every: set[str]) -> str:
    """A hint for a key that stands in the wrong section."""
    found = sorted(name for name in every if name.rpartition(".")[2] == key)
    return f"; did you mean {found[0]!r}?" if found else nearest(key, every)


def _plain(node: Node, kind: Any, bad: set[Path], path: Path = ()) -> Any:
    """Plain data of the known keys, without the paths in ``bad``."""
    if isinstance(node.value, dict):
        section = section_of(kind)
        if section is None:
            return {}
        known = hints(section)
        items = {key: inner for key, inner in node.value.items() if key in known}
        return {
            key: _plain(inner, known[key], bad, (*path, key))
            for key, inner in items.items()
            if not _touched((*path, key), bad, inner)
        }
    if isinstance(node.value, list):
        inner_kind = item_type(kind)
        return [_plain(item, inner_kind, bad, (*path, i)) for i, item in enumerate(node.value)]
    return node.value


def _touched(path: Path, bad: set[Path], node: Node) -> bool:
    """Whether a value is to be left out: it is bad, or a list with a bad item."""
    return path in bad or (
        isinstance(node.value, list) and any(other[: len(path)] == path for other in bad)
    )


def _problem(cls: type, root: Node, path: Path, missing: bool) -> Problem:
    """The line for one path that pydantic refused."""
    kind: Any = cls
    node, place = root, root.place
    for step in path:
        section = section_of(kind)
        kind = hints(section)[step] if section and isinstance(step, str) else item_type(kind)
        if isinstance(node.value, dict) and step in node.value:
            node = node.value[str(step)]
        elif isinstance(node.value, list) and isinstance(step, int):
            node = node.value[step]
        place = node.place
    accepted = f"accepted: {describe(kind)}"
    if missing:
        return Problem(place, f"{_dotted(path)}: missing; {accepted}")
    got = f"got {_shown(node)}, {accepted}{_hint(kind, node)}"
    return Problem(place, f"{_dotted(path)}: {got}" if path else got)


def _shown(node: Node) -> str:
    """A node's value as written."""
    if isinstance(node.value, dict):
        return "a section"
    if isinstance(node.value, list):
        return "a list"
    if node.value is None:
        return "nothing" if not node.raw else node.raw
    return node.raw[:60] if node.plain else repr(node.raw[:60])


def _hint(kind: Any, node: Node) -> str:
    """What most likely went wrong."""
    value, words = node.value, literals(kind)
    numeric = accepts(kind, int) or accepts(kind, float)
    is_bool = isinstance(value, bool)
    is_number = isinstance(value, int | float) and not is_bool and not numeric
    if (is_bool or is_number) and (words or accepts(kind, str)):
        what = "true or false" if is_bool else "a number"
        return f"; YAML reads an unquoted {node.raw} as {what}: quote it if text was meant"
    if isinstance(value, str):
        if numeric and not node.plain:
            return "; leave the quotes out"
        if numeric and ":" in value:
            return "; times are plain numbers of seconds"
        return nearest(value, words)
    section = section_of(kind)
    if section and value is None:
        return "; leave an empty section out"
    if section and isinstance(value, bool) and "enabled" in hints(section):
        return f"; did you mean {{enabled: {node.raw}}}?"
    return ""


def _breaches(root: Node, value: Any, rules: Rules, bad: set[str]) -> Iterator[Problem]:
    """Broken rules, but for those that rest on a value already reported."""
    for breach in rules(value):
        if not any(_rests_on(key, bad) for key in (breach.key, *breach.others)):
            place = _place(root, breach.key)
            yield Problem(place, f"{breach.key}: got {breach.got}, accepted: {breach.accepted}")


def _rests_on(key: str, bad: set[str]) -> bool:
    """Whether a key, one of its items or its section is among the bad ones."""
    return any(f"{other}.".startswith((f"{key}.", f"{key}[")) for other in bad) or any(
        key.startswith(f"{other}.") for other in bad
    )


def _place(root: Node, dotted: str) -> Place:
    """Where a key is written; for a default the nearest enclosing section."""
    node = root
    for key in dotted.split("."):
        if not isinstance(node.value, dict) or key not in node.value:
            return node.place
        node = node.value[key]
    return node.place


def _dotted(path: Path) -> str:
    """``('batch', 'buckets', 0)`` -> ``batch.buckets[0]``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{show_key(step)}"
    return text.removeprefix(".")
