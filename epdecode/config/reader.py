"""YAML text -> a tree of nodes that know their line. Strict: nothing is guessed, nothing explodes.

Scalars follow YAML 1.2's core schema (1e-3 is a float, 1:30:00 is text), except that on, off, yes
and no stay booleans, so that ``graph.enabled: off`` works and ``wire: off`` can be told to quote.
Refused: duplicate keys, anchors and aliases, tags, several documents, deep nesting, large files.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamStartEvent,
)

from epdecode.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 16

_BOOL = re.compile(r"(?i)true|false|on|off|yes|no")
_TRUE = ("true", "on", "yes")
_NULL = re.compile(r"~|null|Null|NULL|")
# Up to 18 digits fit an int64; leading zeros (octal in YAML 1.1, decimal in 1.2) stay text.
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,3})?")

Scalar: TypeAlias = "str | int | float | bool | None"
Value: TypeAlias = "Scalar | list[Node] | dict[str, Node]"


@dataclass(frozen=True, slots=True)
class Node:
    """A value and the place it was written at."""

    value: Value
    place: Place
    raw: str = ""
    """A scalar as written, without quotes."""
    plain: bool = False
    """A scalar written without quotes."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where something was written: a file's line, or an override (line 0)."""

    label: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.label}:{self.line}" if self.line else self.label


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake; ``text`` starts with the dotted key where there is one."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def read_text(path: Path) -> str:
    """The text of a regular UTF-8 file of at most 1 MiB; ConfigError says what is wrong with it."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(f"{path}: not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes; a config is a few KiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text (byte {error.start})") from error


def read_yaml(text: str, place: Place) -> tuple[Node | None, list[Problem]]:
    """The tree of ``text`` and everything wrong with its YAML; no tree after a syntax error.

    ``place`` labels the source. With line 1 nodes count lines from there; with line 0 they do not.
    """
    reader = _Reader(text, place)
    try:
        return reader.document(), reader.problems
    except _Stop:
        return None, reader.problems
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else 0
        reader.report(line, f"not valid YAML: {error.problem or error.context}")
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # ValueError and OverflowError: the scanner's chr() on an impossible \U escape.
        reader.report(0, f"not valid YAML: {str(error).splitlines()[0]}")
    return None, reader.problems


def scalar(raw: str, plain: bool) -> Scalar:
    """The value of one scalar; quoted scalars are text."""
    if not plain:
        return raw
    if _NULL.fullmatch(raw):
        return None
    if _BOOL.fullmatch(raw):
        return raw.lower() in _TRUE
    if _INT.fullmatch(raw):
        return int(raw)
    if _FLOAT.fullmatch(raw) and abs(number := float(raw)) < float("inf"):
        return number
    return raw


class _Stop(Exception):
    """Reading on makes no sense."""


class _Reader:
    """Builds nodes from parser events: unlike PyYAML's composer, depth is counted."""

    def __init__(self, text: str, place: Place) -> None:
        self._events: Iterator[Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        self._place = place
        self.problems: list[Problem] = []

    def report(self, line: int, text: str) -> None:
        self.problems.append(Problem(self._at(line), text))

    def _at(self, line: int) -> Place:
        return Place(self._place.label, self._place.line + line if self._place.line else 0)

    def document(self) -> Node | None:
        for event in self._events:
            if isinstance(event, StreamStartEvent | DocumentStartEvent):
                continue
            if not isinstance(event, ScalarEvent | CollectionStartEvent | AliasEvent):
                return None
            root = self._node(event, "", 0)
            self._end_of_document()
            return root
        return None

    def _end_of_document(self) -> None:
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                self.report(_line(event), "a second document; accepted: one")
                raise _Stop
            if not isinstance(event, DocumentEndEvent):
                return

    def _node(self, event: Event, path: str, depth: int, line: int | None = None) -> Node:
        line = _line(event) if line is None else line
        here = f"{path}: " if path else ""
        if depth > MAX_DEPTH:
            self.report(line, f"{here}nested deeper than {MAX_DEPTH} levels")
            raise _Stop
        anchor = getattr(event, "anchor", None)
        if anchor:
            what = "alias *" if isinstance(event, AliasEvent) else "anchor &"
            self.report(line, f"{here}{what}{anchor} is not accepted: write the value out")
        tag = getattr(event, "tag", None)
        if tag:
            self.report(line, f"{here}tag {tag!r} is not accepted: leave it out")
        if isinstance(event, MappingStartEvent):
            return Node(self._mapping(path, depth), self._at(line))
        if isinstance(event, CollectionStartEvent):
            return Node(self._sequence(path, depth), self._at(line))
        return self._scalar(event, here, line)

    def _scalar(self, event: Event, here: str, line: int) -> Node:
        if not isinstance(event, ScalarEvent):
            return Node(None, self._at(line), raw="*alias")
        plain = event.style is None
        if not event.value.replace("\n", " ").isprintable():
            self.report(line, f"{here}{event.value[:40]!r} has control characters")
        return Node(scalar(event.value, plain), self._at(line), raw=event.value, plain=plain)

    def _sequence(self, path: str, depth: int) -> list[Node]:
        items: list[Node] = []
        for event in self._events:
            if isinstance(event, SequenceEndEvent):
                break
            items.append(self._node(event, f"{path}[{len(items)}]", depth + 1))
        return items

    def _mapping(self, path: str, depth: int) -> dict[str, Node]:
        items: dict[str, Node] = {}
        for event in self._events:
            if isinstance(event, MappingEndEvent):
                break
            line = _line(event)
            if not isinstance(event, ScalarEvent):
                self.report(line, f"{path or 'top level'}: a key must be a plain word")
                raise _Stop
            key = self._node(event, path, depth + 1).raw
            dotted = f"{path}.{show_key(key)}" if path else show_key(key)
            value = self._node(next(self._events), dotted, depth + 1, line)
            if key in items:
                first = items[key].place.line
                said = f" (first on line {first})" if first else ""
                self.report(line, f"{dotted}: duplicate key{said}; keep one")
            else:
                items[key] = value
        return items


def _line(event: Event) -> int:
    """The line an event starts on, from 0."""
    return event.start_mark.line if event.start_mark else 0


def show_key(key: str) -> str:
    """A key as messages show it: quoted and cut where it is not an ordinary word."""
    return key if re.fullmatch(r"[\w-]{1,64}", key) else repr(key[:64])
