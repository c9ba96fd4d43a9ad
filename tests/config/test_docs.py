"""The schema and the reference are made from the dataclasses and shipped current."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from epdecode.config import Config
from epdecode.config.bounds import dotted_keys, hints, section_of
from epdecode.config.docs import config_markdown, field_docs, json_schema, schema_text
from epdecode.config.load import configs_dir, load_config, resolved_yaml
from epdecode.models import ModelShape

PRESETS = sorted(configs_dir().glob("*.yaml"))


def test_the_shipped_schema_is_current():
    shipped = (configs_dir() / "schema.json").read_text(encoding="utf-8")
    assert shipped == schema_text(), "run: python -m epdecode.cli schema > configs/schema.json"


def test_the_shipped_reference_is_current():
    shipped = (Path(__file__).parent.parents[1] / "docs" / "config.md").read_text(encoding="utf-8")
    assert shipped == config_markdown(), (
        "run: python -m epdecode.cli schema --markdown > docs/config.md"
    )


def test_the_reference_has_every_key():
    text = config_markdown()
    missing = [key for key in leaves() if f"| `{key}` |" not in text]
    assert not missing


def leaves() -> list[str]:
    keys = list(dotted_keys(Config))
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


@pytest.mark.parametrize("cls", [Config, ModelShape])
def test_every_field_says_what_it_means(cls: type):
    undocumented = [
        f"{part.__name__}.{name}"
        for part in [cls, *filter(None, map(section_of, hints(cls).values()))]
        for name, kind in hints(part).items()
        if not section_of(kind) and name not in field_docs(part)
    ]
    assert not undocumented


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_and_their_resolved_forms_validate(path: Path):
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=schema.json\n# ")
    jsonschema.validate(yaml.safe_load(text), schema)
    jsonschema.validate(yaml.safe_load(resolved_yaml(load_config(path))), schema)


@pytest.mark.parametrize(
    "bad",
    [
        {"layesr": 1},
        {"layers": 0},
        {"layers": True},
        {"transport": {"wire": "fp9"}},
        {"batch": {"buckets": [0]}},
        {"parallel": {"ep": "all"}},
        {"limits": {"join_s": 0}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(bad: dict[str, object]):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, json_schema())


def test_the_schema_is_json_with_docs_and_defaults():
    properties = json.loads(schema_text())["properties"]
    assert properties["run"]["properties"]["steps"] == {
        "title": "steps",
        "type": "integer",
        "minimum": 1,
        "default": 100,
        "description": "Timed steps.",
    }
    share = properties["routing"]["properties"]["share"]
    assert (share["minimum"], share["maximum"]) == (0, 1)
    assert properties["layers"]["anyOf"] == [
        {"type": "integer", "minimum": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
    ]
