"""What a config dataclass accepts, read from its type hints: for messages, schema and docs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le

_BOUNDS: tuple[tuple[type, str, str], ...] = ((Ge, ">=", "ge"), (Gt, ">", "gt"), (Le, "<=", "le"))
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@cache
def hints(cls: type) -> dict[str, Any]:
    """Field name -> type of a dataclass, with its Annotated bounds."""
    types = get_type_hints(cls, include_extras=True)
    return {field.name: types[field.name] for field in dataclasses.fields(cls)}


def strip(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its Annotated wrapper, and the wrapper's bounds."""
    if get_origin(kind) is Annotated:
        inner, *bounds = get_args(kind)
        return inner, tuple(bounds)
    return kind, ()


def members(kind: Any) -> tuple[Any, ...]:
    """The members of a union; any other type alone."""
    inner, _ = strip(kind)
    return get_args(inner) if get_origin(inner) in (Union, UnionType) else (kind,)


def item_type(kind: Any) -> Any | None:
    """The item type of a list field (``tuple[X, ...]``), None for other types."""
    for member in members(kind):
        inner, _ = strip(member)
        if get_origin(inner) is tuple:
            return get_args(inner)[0]
    return None


def section_of(kind: Any) -> type | None:
    """The dataclass a field holds, None for other types."""
    for member in members(kind):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def literals(kind: Any) -> tuple[str, ...]:
    """The words a field accepts."""
    found = (get_args(m) for m in members(kind) if get_origin(strip(m)[0]) is Literal)
    return tuple(str(word) for words in found for word in words)


def accepts(kind: Any, plain_type: type) -> bool:
    """Whether a scalar of ``plain_type`` is among a field's types."""
    return any(strip(member)[0] is plain_type for member in members(kind))


def describe(kind: Any) -> str:
    """What a field accepts, for people: ``a whole number >= 1, or auto``."""
    parts = [_describe_one(member) for member in members(kind)]
    return ", or ".join(parts)


def _describe_one(kind: Any) -> str:
    inner, bounds = strip(kind)
    if get_origin(inner) is Literal:
        return ", ".join(str(word) for word in get_args(inner))
    if get_origin(inner) is tuple:
        return f"a list, each item {describe(get_args(inner)[0])}"
    if inner is NoneType:
        return "null"
    if section_of(inner):
        return f"a section with the keys {', '.join(hints(inner))}"
    limits = [
        f"{sign} {getattr(bound, attr)}"
        for bound in bounds
        for cls, sign, attr in _BOUNDS
        if type(bound) is cls
    ]
    return " ".join([_WORDS[inner], " and ".join(limits)]).strip()


def dotted_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every key of a dataclass and its sections."""
    for name, kind in hints(cls).items():
        yield prefix + name
        section = section_of(kind)
        if section:
            yield from dotted_keys(section, f"{prefix}{name}.")
