"""Comparisons: ratios against the first, and a refusal of unlike work."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from epdecode.errors import ConfigError
from epdecode.report.compare import as_json, compare, table
from epdecode.result.timing import build_timing
from tests.documents import METHOD, make_result


def faster(factor, **changes):
    timing = build_timing({0: [2500.0 / factor] * 5}, METHOD.layers)
    return make_result(timing=timing, **changes)


def rows(comparison):
    return {row.name: row for row in comparison.rows}


def test_ratios_are_against_the_first():
    made = rows(compare([("a", faster(1)), ("b", faster(2)), ("c", faster(0.5))]))
    assert made["step p50"].values == (2500, 1250, 5000)
    assert made["step p50"].ratios == (1, 0.5, 2)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"config": {"model": "qwen3", "layers": 6}}, "model: deepseek-v3 / qwen3"),
        (
            {"config": {"model": "deepseek-v3", "layers": 6, "batch": {"buckets": [1]}}},
            r"batch\.buckets: \[1, 128\] / \[1\]",
        ),
        ({"method": replace(METHOD, world_size=8)}, "world_size: 4 / 8"),
        ({"method": replace(METHOD, shared_gpu=True)}, "shared_gpu: False / True"),
    ],
)
def test_unlike_work_is_refused(change, key):
    pair = [("a", make_result()), ("b", make_result(**change))]
    with pytest.raises(ConfigError, match=rf"not do the same work .*{key}.*--force"):
        compare(pair)
    assert compare(pair, force=True).unlike


def test_settings_under_comparison_are_listed_not_refused():
    config = dict(make_result().config)
    pair = [
        ("a", make_result(config={**config, "transport": {"wire": "fp8"}})),
        ("b", make_result(config={**config, "transport": {"wire": "bf16"}})),
    ]
    comparison = compare(pair)
    assert comparison.settings == {"transport.wire": ("fp8", "bf16")}
    assert comparison.unlike == {}


def test_a_run_that_did_not_pass_has_no_speed():
    comparison = compare([("a", make_result()), ("b", make_result(status="wrong"))])
    made = rows(comparison)
    assert made["step p50"].values[1] is None
    assert made["tokens/s"].ratios[1] is None
    assert made["worst error"].values == (0.043, 0.043)


def test_one_run_is_too_few():
    with pytest.raises(ConfigError, match="two or more"):
        compare([("a", make_result())])


def test_table_and_json():
    comparison = compare([("first", faster(1)), ("second", faster(2, status="passed"))])
    console = Console(file=io.StringIO(), width=90)
    console.print(table(comparison))
    text = console.file.getvalue()
    assert "x0.500" in text
    assert "first" in text
    assert max(map(len, text.splitlines())) <= 90
    document = as_json(comparison)
    assert document["figures"]["step p50"] == {"values": [2500, 1250], "ratios": [1, 0.5]}
