"""config.json of each model family to a shape; what is unknown or missing is one ConfigError."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epdecode.config.load import digest, find_model, load_config, load_model, resolved_yaml
from epdecode.errors import ConfigError
from epdecode.models import ModelShape, RouterShape
from epdecode.models.hf import is_hub_name, load_hf
from epdecode.models.hf_families import FAMILIES

FIXTURES = Path(__file__).parent.parent / "fixtures" / "hf"
V3_ROUTER = {"scoring": "sigmoid", "bias": True, "group_score": "top2_sum"}

# name -> (hidden, expert_size, num_experts, top_k, shared, moe_layers, weight_format, router)
EXPECTED: dict[str, tuple[Any, ...]] = {
    "deepseek_v2": (
        *(256, 128, 16, 4, 2, (1, 2, 3, 4, 5), "bf16"),
        RouterShape(n_group=4, topk_group=2, norm_topk_prob=False, routed_scaling_factor=16.0),
    ),
    "deepseek_v2_lite": (
        *(256, 128, 16, 4, 2, (1, 2, 3, 4, 5), "bf16"),
        RouterShape(norm_topk_prob=False),
    ),
    "deepseek_v3": (
        *(256, 128, 16, 4, 1, (3, 4, 5), "fp8_block128"),
        RouterShape(**V3_ROUTER, n_group=4, topk_group=2, routed_scaling_factor=2.5),
    ),
    "kimi_k2": (
        *(256, 128, 24, 4, 1, (1, 2, 3, 4, 5), "fp8_block128"),
        RouterShape(**V3_ROUTER, routed_scaling_factor=2.827),
    ),
    "kimi_k2_5": (
        *(256, 128, 24, 4, 1, (1, 2, 3, 4, 5), "fp8_block128"),
        RouterShape(**V3_ROUTER, routed_scaling_factor=2.827),
    ),
    "glm4_moe": (
        *(256, 128, 16, 4, 1, (3, 4, 5), "bf16"),
        RouterShape(**V3_ROUTER, routed_scaling_factor=2.5),
    ),
    "qwen3_moe": (*(256, 128, 16, 4, 0, (0, 1, 2, 3, 4, 5), "fp8_block128"), RouterShape()),
    "qwen2_moe": (*(256, 128, 12, 4, 4, (1, 5), "bf16"), RouterShape(norm_topk_prob=False)),
    "mixtral": (
        *(256, 512, 8, 2, 0, (0, 1, 2, 3), "bf16"),
        RouterShape(softmax_after_topk=True),
    ),
    "minimax_text_01": (
        *(256, 384, 8, 2, 0, (0, 1, 2, 3), "bf16"),
        RouterShape(softmax_after_topk=True),
    ),
    "minimax_m2": (
        *(256, 128, 16, 4, 0, (0, 1, 2, 3), "fp8_block128"),
        RouterShape(scoring="sigmoid", bias=True),
    ),
    "gpt_oss": (
        *(288, 288, 8, 4, 0, (0, 1, 2, 3), "bf16"),
        RouterShape(softmax_after_topk=True),
    ),
}


def figures(model: ModelShape) -> tuple[Any, ...]:
    sizes = (model.hidden, model.expert_size, model.num_experts, model.top_k)
    return (
        *sizes,
        model.num_shared_experts,
        model.moe_layers,
        model.weight_format,
        model.router,
    )


def changed(tmp_path: Path, family: str, **changes: Any) -> Path:
    """A copy of a family's fixture with other fields; None takes a field away."""
    raw = json.loads((FIXTURES / family / "config.json").read_text()) | changes
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return path


def complaints(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_hf(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(str(path)) for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


@pytest.mark.parametrize("family", EXPECTED)
def test_each_family_gives_its_shape(family: str):
    model = load_model(str(FIXTURES / family))
    assert figures(model) == EXPECTED[family]
    assert model.num_moe_layers == len(model.moe_layers)
    assert model.name == family


def test_every_fixture_has_an_expectation_and_most_families_a_fixture():
    found = {path.name for path in FIXTURES.iterdir()}
    assert found == set(EXPECTED)
    read = [json.loads((FIXTURES / name / "config.json").read_text()) for name in found]
    covered = {raw.get("text_config", raw)["architectures"][0] for raw in read}
    same_reader = {family for name, family in FAMILIES.items() if name in covered}
    assert all(family in same_reader for family in FAMILIES.values())


@pytest.mark.parametrize(
    ("family", "note"),
    [("gpt_oss", "no expert or router biases"), ("qwen2_moe", "sigmoid gate on its shared expert")],
)
def test_the_source_says_what_is_not_reproduced(family: str, note: str):
    assert note in load_model(str(FIXTURES / family)).source


@pytest.mark.parametrize("family", sorted(EXPECTED.keys() - {"kimi_k2_5"}))
def test_a_missing_field_is_named(tmp_path: Path, family: str):
    assert complaints(changed(tmp_path, family, hidden_size=None)) == [
        "hidden_size: missing; accepted: a whole number from 1 to 16777216"
    ]


def test_everything_wrong_is_reported_at_once(tmp_path: Path):
    path = changed(
        tmp_path,
        "deepseek_v3",
        hidden_size="7168",
        n_routed_experts=True,
        num_experts_per_tok=0,
        routed_scaling_factor=-1,
        norm_topk_prob=1,
        scoring_func="softmax",
        first_k_dense_replace=None,
    )
    assert [line.split(":")[0] for line in complaints(path)] == [
        "first_k_dense_replace",
        "hidden_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "scoring_func",
        "norm_topk_prob",
        "routed_scaling_factor",
    ]


@pytest.mark.parametrize(
    ("family", "changes", "line"),
    [
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act: got 'gelu', accepted: silu"),
        ("deepseek_v3", {"num_hidden_layers": 3}, "no layer of this model is an MoE layer"),
        ("deepseek_v3", {"num_hidden_layers": 10**12}, "num_hidden_layers: got 1000000000000, acc"),
        (
            "deepseek_v3",
            {"n_group": 3},
            "router.n_group: got 3, accepted: a divisor of num_experts",
        ),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method: got 'noaux_tc', accepted: ",
        ),
        (
            "deepseek_v2",
            {"norm_topk_prob": True},
            "norm_topk_prob: got True, accepted: false, as in",
        ),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 100},
            "shared_expert_intermediate_size: got",
        ),
        (
            "qwen3_moe",
            {"mlp_only_layers": ["a"]},
            "mlp_only_layers: got ['a'], accepted: a list of ",
        ),
        (
            "minimax_m2",
            {"shared_intermediate_size": 8},
            "shared_intermediate_size: got 8, accepted: 0",
        ),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config.quant_method: got 'awq', accepted: none, or fp8 with weight_block",
        ),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config.quant_method: got 'mxfp4', accepted: none, or fp8 with",
        ),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}},
            "quantization_config.weight_block_size: got [1, 128], accepted: none, or fp8 with",
        ),
        (
            "mixtral",
            {"architectures": ["MixtralForCausalLm"]},
            "architectures: got ['MixtralForCausalLm'], accepted: DeepseekV2ForCausalLM, ",
        ),
        (
            "mixtral",
            {"architectures": None},
            "architectures: missing, accepted: DeepseekV2ForCausal",
        ),
        ("mixtral", {"architectures": [["x"]]}, "architectures: got [['x']], accepted: DeepseekV2"),
    ],
)
def test_what_the_layer_cannot_stand_for_is_refused(tmp_path: Path, family, changes, line: str):
    (got,) = complaints(changed(tmp_path, family, **changes))
    assert got.startswith(line), got


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"a": NaN', "[" * 100_000, "9" * 5000, '{"architectures": 5}']
)
def test_broken_json_is_a_config_error(tmp_path: Path, text: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="config.json"):
        load_hf(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=200, deadline=2000)
@given(data=st.data(), family=st.sampled_from(sorted(EXPECTED)))
def test_a_wrong_value_anywhere_ends_in_a_shape_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, family: str
):
    raw = json.loads((FIXTURES / family / "config.json").read_text())
    part = raw.get("text_config", raw)
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(json_values)
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_text(json.dumps(raw))
    try:
        outcome: object = load_hf(path)
    except ConfigError as error:
        outcome = error
    assert isinstance(outcome, ModelShape | ConfigError)


def test_a_folder_its_config_json_and_a_path_beside_the_config_are_one(tmp_path: Path):
    shutil.copytree(FIXTURES / "mixtral", tmp_path / "mixtral")
    near = tmp_path / "x.yaml"
    by_folder = load_model("mixtral", near)
    assert by_folder.source == str(tmp_path / "mixtral" / "config.json")
    assert load_model("mixtral/config.json", near) == by_folder
    assert load_model(str(tmp_path / "mixtral")) == by_folder


def test_a_config_with_a_folder_can_be_moved(tmp_path: Path):
    shutil.copytree(FIXTURES / "mixtral", tmp_path / "a" / "mixtral")
    first = tmp_path / "a" / "x.yaml"
    first.write_text("model: mixtral")
    config = load_config(first)
    moved = tmp_path / "y.yaml"
    moved.write_text(resolved_yaml(config, first))
    again = load_config(moved)
    assert digest(again, load_model(again.model, moved)) == digest(
        config, load_model(config.model, first)
    )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Path:
    """An empty Hub cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_name_is_read_from_the_local_cache(hub: Path):
    repo = hub / "models--org--Some-Model"
    blob = repo / "blobs" / "1234"
    blob.parent.mkdir(parents=True)
    shutil.copy(FIXTURES / "qwen3_moe" / "config.json", blob)
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "snapshots" / "abc" / "config.json").symlink_to(blob)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    model = load_model("org/Some-Model")
    assert figures(model) == EXPECTED["qwen3_moe"]
    assert model.name == "Some-Model"
    config = load_config("cpu-tiny", ["model=org/Some-Model"])
    assert "model: org/Some-Model\n" in resolved_yaml(config)


def test_a_hub_name_that_is_not_there_says_path_and_remedy(hub: Path):
    with pytest.raises(ConfigError) as caught:
        load_model("org/name", near="/somewhere/x.yaml")
    text = str(caught.value)
    assert f"no {hub}/models--org--name/snapshots/*/config.json" in text
    assert "`hf download org/name config.json`" in text
    assert "/somewhere/org/name" in text


def test_without_huggingface_hub_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="epdecode\\[hub\\]"):
        load_model("org/name")


@pytest.mark.parametrize(
    ("name", "is_hub"),
    [
        ("deepseek-ai/DeepSeek-V3", True),
        ("org/name.yaml", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("../b", False),
        ("name", False),
    ],
)
def test_what_may_be_a_hub_name(name: str, is_hub: bool):
    assert is_hub_name(name) is is_hub


def test_a_folder_without_a_config_json_is_no_hub_name(tmp_path: Path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="folder with a config.json"):
        find_model("org/name")
