"""Which cut for which load; tables on disk: found again, refused when broken, replaced whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epdecode.errors import ConfigError
from epdecode.plan.expert_choice import (
    MOST_STAGES,
    ROWS,
    SPLITS,
    Choice,
    ExpertShape,
    bucket,
    choose,
    default_choice,
    fuller,
    load_table,
    save_table,
    splits_for,
    table_path,
)

SHAPE = ExpertShape(experts=32, hidden=7168, size=2048)


@pytest.mark.parametrize(
    ("rows", "entry"), [(0, 1), (1, 1), (2, 4), (16, 16), (17, 32), (1000, ROWS[-1])]
)
def test_bucket(rows, entry):
    assert bucket(rows) == entry


@pytest.mark.parametrize(
    ("rows", "even", "drawn", "skewed"),
    [(1, 1, 3, 4), (16, 16, 24, 64), (32, 32, 44, 128), (64, 64, 80, 128), (200, 200, 229, 229)],
)
def test_a_tile_holds_the_fuller_experts(rows, even, drawn, skewed):
    assert fuller(rows, "even") == even
    assert fuller(rows, "drawn") == drawn
    assert fuller(rows, "skewed") == skewed


@pytest.mark.parametrize("rows", [0, 1, 5, 16, 17, 32, 33, 64, 200])
def test_the_rule_holds_the_load_in_one_tile_up_to_its_largest(rows):
    choice = default_choice(SHAPE, rows)
    assert choice.tokens >= min(rows, 128)


@pytest.mark.parametrize(
    ("experts", "rows", "tokens", "splits"),
    [(1, 16, 16, 4), (1, 64, 32, 2), (2, 64, 64, 2), (2, 128, 64, 1), (4, 16, 16, 1)],
)
def test_parts_of_k_fill_the_pairs_of_processors_once(experts, rows, tokens, splits):
    shape = replace(SHAPE, experts=experts)
    assert splits_for(shape, rows, tokens) == splits
    assert splits_for(replace(shape, hidden=128 * 3), rows, tokens) == 1


def test_the_rule_splits_long_k_only():
    one = replace(SHAPE, experts=1)
    assert default_choice(one, 16).splits == 4
    assert default_choice(replace(one, hidden=2048), 16).splits == 1
    assert default_choice(SHAPE, 16).splits == 1


@pytest.mark.parametrize(
    ("experts", "rows", "backend"),
    [
        (1, 16, "triton_gemm"),
        (1, 17, "deepgemm"),
        (2, 32, "triton_gemm"),
        (2, 33, "deepgemm"),
        (4, 64, "triton_gemm"),
        (8, 128, "triton_gemm"),
        (8, 129, "deepgemm"),
    ],
)
def test_the_rule_takes_the_backend_that_was_faster(experts, rows, backend):
    assert default_choice(replace(SHAPE, experts=experts), rows).backend == backend


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("experts", [1, 4, 8, 32])
def test_the_rule_asks_for_cuts_that_exist(experts, rows):
    choice = default_choice(replace(SHAPE, experts=experts), rows)
    assert choice.stages <= MOST_STAGES[choice.tokens]
    assert choice.splits in SPLITS
    assert not (choice.narrow and choice.tokens > 32)


def test_a_table_outranks_the_rule_for_its_shape_and_load_only():
    tuned = Choice(tokens=32, stages=3)
    table = {SHAPE.key: {16: tuned}}
    assert choose(SHAPE, 9, table) == tuned
    assert choose(SHAPE, 8, table) == default_choice(SHAPE, 8)
    assert choose(replace(SHAPE, experts=8), 9, table) == default_choice(
        replace(SHAPE, experts=8), 9
    )


def test_a_table_is_found_again(tmp_path):
    table = {SHAPE.key: {16: Choice(tokens=32, splits=2), 64: Choice(backend="deepgemm")}}
    path = tmp_path / "deep" / "table.json"
    save_table(path, table)
    assert load_table(path) == table
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


def test_no_table_is_an_empty_one(tmp_path):
    assert load_table(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": "other"}',
        '{"schema": "epdecode.expert_choice/3", "choices": {"k": {"x": {}}}}',
    ],
)
def test_a_broken_table_is_refused_by_its_path(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"table\.json"):
        load_table(path)


def test_the_path_follows_gpu_versions_and_cache_folder(tmp_path):
    env = {"EPDECODE_CACHE_DIR": str(tmp_path)}
    one = table_path("NVIDIA H200", {"triton": "3.6.0"}, env)
    assert one.parent == tmp_path / "experts"
    assert one.name.startswith("nvidia-h200-")
    assert one != table_path("NVIDIA H200", {"triton": "3.7.0"}, env)
    assert one != table_path("NVIDIA H100", {"triton": "3.6.0"}, env)
    assert table_path("x", {}, {"HOME": "/h"}).parts[:3] == ("/", "h", ".cache")
