"""The strict YAML reader: scalars, refusals, and only ConfigError for hostile text."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epdecode.config.load import load_config
from epdecode.config.reader import MAX_BYTES, Place, read_text, read_yaml, scalar
from epdecode.errors import ConfigError


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("1e-3", 1e-3),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2.5E+2", -250.0),
        ("12", 12),
        ("-0", 0),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1:30:00", "1:30:00"),
        ("2026-12-01", "2026-12-01"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("9" * 5000, "9" * 5000),
        ("off", False),
        ("On", True),
        ("YES", True),
        ("n", "n"),
        ("~", None),
        ("", None),
        ("null", None),
        ("deepep_ll", "deepep_ll"),
        ("e5", "e5"),
        ("1e5", 1e5),
    ],
)
def test_plain_scalars_follow_yaml_1_2_but_for_on_and_off(raw: str, value: object):
    got = scalar(raw, plain=True)
    assert got == value
    assert type(got) is type(value)


def test_quoted_scalars_are_text():
    assert [scalar(raw, plain=False) for raw in ("1", "off", "")] == ["1", "off", ""]


def problems_of(text: str) -> list[str]:
    return [str(problem) for problem in read_yaml(text, Place("f.yaml", 1))[1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3: a: duplicate key (first on line 1); keep one"),
        ("a:\n  b: 1\n  b: 2", "f.yaml:3: a.b: duplicate key (first on line 2); keep one"),
        ("a: &x 1", "f.yaml:1: a: anchor &x is not accepted: write the value out"),
        ("a: *x", "f.yaml:1: a: alias *x is not accepted: write the value out"),
        (
            "a: !!python/name:os.system x",
            "f.yaml:1: a: tag 'tag:yaml.org,2002:python/name:os.system'",
        ),
        ("a: 1\n---\nb: 2", "f.yaml:2: a second document; accepted: one"),
        ("a: [1, 2", "f.yaml:1: not valid YAML: expected ',' or ']'"),
        ("a:\n\t- 1", "f.yaml:2: not valid YAML: found character '\\t'"),
        ("[a]: 1", "f.yaml:1: top level: a key must be a plain word"),
        ("a: " + "[" * 40, "f.yaml:1: a[0]"),
        ('a: "\\x00"', "f.yaml:1: a: '\\x00' has control characters"),
        ('a: "\\ud800"', "f.yaml:1: a: '\\ud800' has control characters"),
        ('a: "\\U7fffffff"', "f.yaml:1: not valid YAML"),
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1", "f.yaml:1: not valid YAML"),
    ],
)
def test_refusals_name_the_place(text: str, expected: str):
    assert any(problem.startswith(expected) for problem in problems_of(text)), problems_of(text)


def test_merge_keys_are_ordinary_unknown_keys():
    node, problems = read_yaml("<<: {a: 1}", Place("f.yaml", 1))
    assert node is not None
    assert list(node.value) == ["<<"]
    assert not problems


def test_alias_bombs_do_not_expand():
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    start = time.monotonic()
    assert any("alias *a10 is not accepted" in problem for problem in problems_of("\n".join(lines)))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a: \xff", ":1: not UTF-8 text (byte 3)"),
        (b"#" * (MAX_BYTES + 1), "larger than 1048576 bytes"),
    ],
)
def test_bad_files_are_config_errors(tmp_path: Path, data: bytes, expected: str):
    path = tmp_path / "x.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_text(path)
    assert expected in str(caught.value)


def test_folders_devices_and_missing_files_are_config_errors(tmp_path: Path):
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "none", Path("a\0b")):
        with pytest.raises(ConfigError):
            read_text(path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbflayers: 3\n")
    assert load_config(path).layers == 3


PRESET = (Path(__file__).parent.parents[1] / "configs" / "cpu-tiny.yaml").read_text(
    encoding="utf-8"
)
FRAGMENTS = st.sampled_from(
    [
        "&a ",
        "*a",
        "!!set ",
        "- ",
        ": ",
        "? ",
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
        "|\n",
        ">\n",
        "\t",
        "\n",
    ]
    + ["---\n", "...\n", "%TAG ! x\n", "<<: ", "\\U7fffffff", "\0", "\x85", "\ud800", "#", "off"]
)


@st.composite
def mutated_presets(draw: st.DrawFn) -> str:
    text = PRESET
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 12))
        text = text[:at] + draw(FRAGMENTS | st.text(max_size=6)) + text[at + cut :]
    return text


def outcome(path: Path | str, *overrides: str) -> str:
    try:
        return repr(load_config(path, overrides))
    except ConfigError as error:
        return str(error)


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(text=mutated_presets() | st.text(max_size=60))
def test_hostile_text_ends_in_a_config_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
):
    path = tmp_path_factory.getbasetemp() / "hostile.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert outcome(path).startswith(("Config(", str(path)))


@settings(max_examples=300, deadline=2000)
@given(text=st.text(max_size=40) | st.builds("layers={}".format, st.text(max_size=20)))
def test_hostile_overrides_end_in_a_config_or_a_config_error(text: str):
    assert outcome("cpu-tiny", text).startswith(("Config(", "override "))
