"""Shapes in configs/models, and the checks on a shape of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from epdecode.config.load import configs_dir, load_config, load_model, model_names
from epdecode.errors import ConfigError
from epdecode.models import ModelShape
from epdecode.plan import make_plan

# (hidden, expert_size, num_experts, top_k, num_shared_experts, num_moe_layers)
PUBLISHED = {
    "deepseek-v3": (7168, 2048, 256, 8, 1, 58),
    "deepseek-v3-routed": (7168, 2048, 256, 8, 0, 58),
    "deepseek-v2-lite": (2048, 1408, 64, 6, 2, 26),
    "kimi-k2": (7168, 2048, 384, 8, 1, 60),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 0, 94),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0, 48),
    "glm-4.5": (5120, 1536, 160, 8, 1, 89),
    "gpt-oss-120b": (2880, 2880, 128, 4, 0, 36),
}


def figures(model: ModelShape) -> tuple[int, ...]:
    sizes = (model.hidden, model.expert_size, model.num_experts, model.top_k)
    return (*sizes, model.num_shared_experts, model.num_moe_layers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_figures(name: str):
    model = load_model(name)
    assert figures(model) == PUBLISHED[name]
    assert model.source.startswith("https://huggingface.co/")


def test_every_shape_is_named_like_its_file():
    assert set(model_names()) == {*PUBLISHED, "tiny"}
    for name in model_names():
        assert load_model(name).name == name


def test_tiny_has_every_feature_of_the_big_layer_at_small_size():
    tiny, big = load_model("tiny"), load_model("deepseek-v3")
    assert figures(tiny)[:5] == (256, 256, 8, 2, 1)
    assert (tiny.router.scoring, tiny.router.bias) == (big.router.scoring, big.router.bias)
    assert tiny.router.n_group > tiny.router.topk_group > 1


def test_deepseek_v3s_router():
    router = load_model("deepseek-v3").router
    assert (router.n_group, router.topk_group, router.group_score) == (8, 4, "top2_sum")
    assert (router.norm_topk_prob, router.routed_scaling_factor) == (True, 2.5)


def test_shared_size_is_that_of_all_shared_experts():
    assert load_model("deepseek-v2-lite").shared_size == 2816
    assert load_model("qwen3-30b-a3b").shared_size == 0


SHAPE = """
name: x
source: here
hidden: 256
expert_size: 128
num_experts: 8
top_k: 2
num_moe_layers: 1
"""


def error_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_model("x.yaml", near=tmp_path / "config.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            SHAPE + "router: {n_group: 3}",
            ":9: router.n_group: got 3, accepted: a divisor of num_expe",
        ),
        (
            SHAPE + "router: {topk_group: 2}",
            ":9: router.topk_group: got 2, accepted: up to router.n_g",
        ),
        (
            SHAPE + "router: {n_group: 8}",
            ":9: router.topk_group: got 1, accepted: groups enough for",
        ),
        (
            SHAPE + "router: {n_group: 8, topk_group: 2, group_score: top2_sum}",
            ":9: router.group_score: got top2_sum, accepted: max, since a group here has one",
        ),
        (
            SHAPE + "router: {scoring: sigmoid, softmax_after_topk: true}",
            ":9: router.scoring: got sigmoid, accepted: softmax when softmax_after_topk is true",
        ),
        (
            SHAPE + "moe_layers: [3, 4]",
            ":9: moe_layers: got [3, 4], accepted: num_moe_layers = 1 ascending numbers",
        ),
        (
            SHAPE.replace("top_k: 2", "top_k: 9"),
            ":7: top_k: got 9, accepted: up to num_experts = 8",
        ),
        (SHAPE.replace("top_k: 2", "topk: 2"), ":7: topk: unknown key; accepted: name, source"),
        (SHAPE.replace("top_k: 2", ""), ":2: top_k: missing; accepted: a whole number >= 1"),
        (SHAPE.replace("256", "0"), ":4: hidden: got 0, accepted: a whole number >= 1"),
    ],
)
def test_mistakes_in_a_shape_name_file_line_and_key(tmp_path: Path, text: str, expected: str):
    assert f"{tmp_path / 'x.yaml'}{expected}" in error_of(tmp_path, text)


def test_an_unknown_name_lists_names_paths_and_the_nearest(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        load_model("deepseek-v4", near=tmp_path / "config.yaml")
    assert "did you mean 'deepseek-v3'?" in str(caught.value)
    assert str(tmp_path / "deepseek-v4") in str(caught.value)


def test_a_shape_beside_the_config_comes_before_one_here(tmp_path: Path, monkeypatch):
    (tmp_path / "near").mkdir()
    shape = (configs_dir() / "models" / "tiny.yaml").read_text(encoding="utf-8")
    (tmp_path / "near" / "m.yaml").write_text(shape.replace("layers: 4", "layers: 5"))
    (tmp_path / "m.yaml").write_text(shape)
    monkeypatch.chdir(tmp_path)
    assert load_model("m.yaml", near=tmp_path / "near" / "c.yaml").num_moe_layers == 5
    assert load_model("m.yaml").num_moe_layers == 4


@pytest.mark.parametrize(
    ("preset", "world_size", "ranks_per_gpu"),
    [
        ("cpu-tiny", 4, 1),
        ("deepseek_v3-h200-deepep_ll", 1, 1),
        ("deepseek_v3-h200-deepep_ll", 8, 8),
        ("deepseek_v3-h200x8-deepep_ll", 8, 1),
        ("deepseek_v3-h200-ep8_share", 1, 1),
        ("qwen3_235b-h200-ep8_share", 1, 1),
        ("qwen3_30b-h200-ep8_share", 1, 1),
    ],
)
def test_presets_fit_the_machines_they_name(preset: str, world_size: int, ranks_per_gpu: int):
    config = load_config(preset)
    plan = make_plan(config, load_model(config.model), world_size, ranks_per_gpu=ranks_per_gpu)
    assert plan.world_size == world_size


def test_gpt_oss_runs_in_bf16_through_torch_only():
    model = load_model("gpt-oss-120b")
    small = ["transport.wire=bf16", "model=gpt-oss-120b"]
    assert make_plan(load_config("cpu-tiny", small), model, 2).model.hidden == 2880
    for override in ("transport.wire=fp8", "transport.name=deepep_ll"):
        with pytest.raises(ConfigError, match="2880"):
            make_plan(load_config("cpu-tiny", [*small, override]), model, 2)
