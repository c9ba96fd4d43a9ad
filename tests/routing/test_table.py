"""Load tables: the forms recorders write, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from epdecode.errors import ConfigError
from epdecode.plan import make_plan
from epdecode.routing.load import Recorded, expected_load, read_load
from epdecode.routing.table import LoadTable, read_load_table
from epdecode.routing.trace import Trace
from tests.small import small_config, small_model

LONG = "layer_id,expert_id,count\n3,0,10\n3,1,5\n4,1,7\n3,0,2\n"


def write(path: Path, text: object) -> Path:
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def test_lines_of_layer_expert_and_count_add_up(tmp_path: Path) -> None:
    table = read_load_table(write(tmp_path / "t.csv", LONG))
    assert table.num_rows == 5
    assert table.row(3, 4).tolist() == [12, 5, 0, 0]
    assert table.row(4, 4).tolist() == [0, 7, 0, 0]


def test_columns_may_be_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "count,Layer,rank,expert\n9,0,5,1\n")
    assert read_load_table(path).row(0, 2).tolist() == [0, 9]


def test_a_line_per_layer(tmp_path: Path) -> None:
    table = read_load_table(write(tmp_path / "t.csv", "1,2,3.5\n4,5,6\n"))
    assert table.counts.tolist() == [[1, 2, 3.5], [4, 5, 6]]


@pytest.mark.parametrize(
    "document",
    [
        [[1, 2], [3, 4]],
        {"logical_count": [[[1, 0], [3, 0]], [[0, 2], [0, 4]]]},
        {"counts": [[1, 2], [3, 4]]},
        {"0": [1, 2], "1": [3, 4]},
    ],
)
def test_forms_of_json(tmp_path: Path, document: object) -> None:
    table = read_load_table(write(tmp_path / "t.json", document))
    assert table.counts.tolist() == [[1, 2], [3, 4]]


def test_layers_that_a_mapping_leaves_out_are_empty(tmp_path: Path) -> None:
    table = read_load_table(write(tmp_path / "t.json", {"2": [3, 4]}))
    assert table.num_rows == 3
    with pytest.raises(ConfigError, match="layer row 1 has no tokens at all"):
        table.row(1, 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "no table of counts: the file is empty"),
        ("t.csv", "1,2\n3\n", "no table of counts"),
        ("t.csv", "layer,expert\n1,2\n", "no table of counts"),
        ("t.csv", "layer,expert,count\n", "a header without lines"),
        ("t.csv", "layer,expert,count\n-1,0,1\n", "layers 0 to 9999"),
        ("t.csv", "layer,expert,count\n999999999,0,1\n", "layers 0 to 9999"),
        ("t.csv", "1,-2\n", "accepted: counts >= 0"),
        ("t.json", "[[1, 2], [3]]", "no table of counts"),
        ("t.json", "[[1, NaN]]", "accepted: counts >= 0"),
        ("t.json", "{}", "layer numbers from 0"),
        ("t.json", "[1, 2]", r"got shape \[2\], accepted: \[layers, experts\]"),
        ("t.json", "nope", "no table of counts"),
        ("t.pt", "x", r"got \.pt; accepted"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_load_table(write(tmp_path / name, text))


def test_experts_left_out_at_the_end_got_nothing_but_not_in_a_matrix(tmp_path: Path) -> None:
    assert read_load_table(write(tmp_path / "a.csv", LONG)).row(4, 8).sum() == 7
    with pytest.raises(ConfigError, match="2 experts; the model has 8"):
        read_load_table(write(tmp_path / "b.csv", "1,2\n")).row(0, 8)
    with pytest.raises(ConfigError, match="2 experts; the model has 1"):
        read_load_table(write(tmp_path / "a.csv", LONG)).row(4, 1)


def test_a_load_is_a_trace_or_a_table_by_its_suffix(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.zeros((2, 1, 1), dtype=np.int8))
    assert isinstance(read_load(tmp_path / "t.npy"), Trace)
    assert isinstance(read_load(write(tmp_path / "t.csv", LONG)), LoadTable)
    with pytest.raises(ConfigError, match=r"t\.txt: got \.txt; accepted: \.npy, \.npz, \.safet"):
        read_load(tmp_path / "t.txt")


def test_a_table_with_dense_layers_is_read_by_the_models_own_numbers(tmp_path: Path) -> None:
    model = small_model(num_moe_layers=2, moe_layers=(3, 4))
    table = read_load_table(write(tmp_path / "t.csv", LONG))
    config = small_config("layers=[4]", "routing={kind: load_table, path: t.csv}")
    plan = make_plan(config, model, 2, recorded=Recorded(routing=table))
    (load,) = expected_load(config, model, plan.loop_layers, 2, Recorded(routing=table))
    assert load.tolist() == [0, 7, 0, 0, 0, 0, 0, 0]
    assert plan.placement.rank_imbalance == 2.0
    assert plan.placement.load.endswith("t.csv")


@pytest.mark.parametrize(
    ("overrides", "imbalance"),
    [
        (["routing.kind=uniform"], 1.0),
        (["routing.kind=balanced"], 1.0),
        (["routing.kind=model"], 1.0),
        (["routing.kind=stress"], 4.0),
        (["routing.kind=hot_rank", "routing.share=0.7"], 2.8),
        (["routing.kind=hot_expert", "routing.share=1"], 16 / 7),
    ],
)
def test_expected_imbalance_of_a_kind_over_four_ranks(
    overrides: list[str], imbalance: float
) -> None:
    plan = make_plan(small_config(*overrides), small_model(), 4)
    assert plan.placement.rank_imbalance == pytest.approx(imbalance)
