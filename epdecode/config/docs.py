"""The JSON Schema and the Markdown table of a config, made from its dataclasses and their docs."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le

from epdecode.config import Config
from epdecode.config.bounds import describe, hints, members, section_of, strip
from epdecode.models import ModelShape

_KEYWORDS: tuple[tuple[type, str, str], ...] = (
    (Ge, "ge", "minimum"),
    (Gt, "gt", "exclusiveMinimum"),
    (Le, "le", "maximum"),
)
_JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}

_INTRO = """
# Config

<!-- Made by `python -m epdecode.cli schema --markdown > docs/config.md`; do not edit by hand. -->

One YAML file says what to run. [The presets](../configs) are examples; `configs/cpu-tiny.yaml` is
the default. Every key may be left out: its default then holds. `--print-config` prints them all.

The file is read strictly, and every mistake in it is reported at once, each with file and line, the
key, what it got, what is accepted and the nearest name:

- unknown and duplicate keys are errors at any depth;
- `1e-3` is a number; `1:30:00` is text, never 5400; a number with quotes is text;
- `on`, `off`, `yes`, `no`, `true`, `false` are booleans, and must be quoted where text is wanted;
- `true` is no number, and a whole number does where a number is wanted;
- anchors, aliases, tags and further documents are refused.

Any key can be overridden on the command line: `batch.tokens_per_rank=64`, `'batch.buckets=[1, 8]'`,
`parallel.stand_in_ep=null`. The value is YAML; the last of equal keys wins; a section given as a
mapping replaces the whole section. In an editor with a YAML language server the first line of each
preset gives completion and checks against [the schema](../configs/schema.json).
"""


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal below it in the class's source, on one line."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef), "fields are documented in classes only"
    docs = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = following.value if isinstance(following, ast.Expr) else None
            if isinstance(value, ast.Constant):
                docs[statement.target.id] = " ".join(str(value.value).split())
    return docs


def json_schema(cls: type = Config) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that editors check a file of this dataclass against."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "epdecode config"}
    return head | _object(cls)


def schema_text() -> str:
    """``configs/schema.json`` as it is shipped."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _object(cls: type) -> dict[str, Any]:
    docs = field_docs(cls)
    properties = {}
    for field in dataclasses.fields(cls):
        prop = _any_of(hints(cls)[field.name])
        text = docs.get(field.name)
        properties[field.name] = {"title": field.name} | prop | _default(field)
        if text:
            properties[field.name]["description"] = text
    required = [field.name for field in dataclasses.fields(cls) if _is_required(field)]
    schema: dict[str, Any] = {
        "type": "object",
        "description": inspect.getdoc(cls),
        "additionalProperties": False,
        "properties": properties,
    }
    return schema | ({"required": required} if required else {})


def _any_of(kind: Any) -> dict[str, Any]:
    choices = [_one(member) for member in members(kind)]
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _one(kind: Any) -> dict[str, Any]:
    inner, bounds = strip(kind)
    if section := section_of(inner):
        return _object(section)
    if get_origin(inner) is Literal:
        return {"enum": list(get_args(inner))}
    if get_origin(inner) is tuple:
        return {"type": "array", "items": _any_of(get_args(inner)[0])}
    schema: dict[str, Any] = {"type": _JSON_TYPES[inner]}
    for bound in bounds:
        schema |= {key: getattr(bound, at) for cls, at, key in _KEYWORDS if type(bound) is cls}
    return schema


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    if field.default is dataclasses.MISSING:
        return {}
    is_tuple = isinstance(field.default, tuple)
    return {"default": list(field.default) if is_tuple else field.default}


def config_markdown() -> str:
    """``docs/config.md`` as it is shipped."""
    lines = [_INTRO.strip(), ""]
    for title, cls, rows in (
        *_sections(Config, "Top level"),
        *_sections(ModelShape, "Model files"),
    ):
        lines += [f"## {title}", "", inspect.getdoc(cls) or "", ""]
        lines += ["| Key | Default | Accepts | Meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _sections(cls: type, title: str) -> Iterator[tuple[str, type, list[str]]]:
    top = [field for field in dataclasses.fields(cls) if not section_of(hints(cls)[field.name])]
    yield title, cls, [_row(cls, field, "") for field in top]
    for name, kind in hints(cls).items():
        if section := section_of(kind):
            rows = [_row(section, field, f"{name}.") for field in dataclasses.fields(section)]
            yield f"`{name}`", section, rows


def _row(cls: type, field: dataclasses.Field[Any], prefix: str) -> str:
    accepted = describe(hints(cls)[field.name]).replace("|", "\\|")
    default = f"`{_yaml(field.default)}`" if _default(field) else "required"
    text = re.sub(r"``(.+?)``", r"`\1`", field_docs(cls).get(field.name, "")).replace("|", "\\|")
    return f"| `{prefix}{field.name}` | {default} | {accepted} | {text} |"


def _yaml(default: Any) -> str:
    """A default as one would write it in a file."""
    return default if isinstance(default, str) else json.dumps(default)
