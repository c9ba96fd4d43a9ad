"""Key names of each family's releases, written out here once more and on their own."""

from __future__ import annotations

import pytest

from epdecode.models.hf import load_hf, read_architecture
from epdecode.models.hf_families import FAMILIES as KNOWN
from epdecode.weights.layout import LAYOUTS, LayerKeys
from tests.checkpoints import FAMILIES, FIXTURES

NORM = "model.layers.5.post_attention_layernorm.weight"
GATE = "model.layers.5.mlp.gate.weight"
BIAS = "model.layers.5.mlp.gate.e_score_correction_bias"
PROJECTIONS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
FP8_PROJECTIONS = tuple(f"{name}{suffix}" for name in PROJECTIONS for suffix in ("", "_scale_inv"))
SPARSE = "model.layers.5.block_sparse_moe."


def experts(root: str, count: int, names: tuple[str, ...]) -> set[str]:
    return {f"{root}experts.{expert}.{name}" for expert in range(count) for name in names}


def below(root: str, names: tuple[str, ...]) -> set[str]:
    return {root + name for name in names}


MLP = "model.layers.5.mlp."
SHARED = f"{MLP}shared_experts."
W123 = ("w1.weight", "w3.weight", "w2.weight")
FP8_W123 = tuple(f"{name}{suffix}" for name in W123 for suffix in ("", "_scale_inv"))
DEEPSEEK_V2 = {NORM, GATE} | experts(MLP, 16, PROJECTIONS) | below(SHARED, PROJECTIONS)
KIMI = {NORM, GATE, BIAS} | experts(MLP, 24, FP8_PROJECTIONS) | below(SHARED, FP8_PROJECTIONS)

KEYS = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2_lite": DEEPSEEK_V2,
    "deepseek_v3": {NORM, GATE, BIAS}
    | experts(MLP, 16, FP8_PROJECTIONS)
    | below(SHARED, FP8_PROJECTIONS),
    "kimi_k2": KIMI,
    "kimi_k2_5": KIMI,
    "glm4_moe": DEEPSEEK_V2 | {BIAS},
    "qwen3_moe": {NORM, GATE} | experts(MLP, 16, FP8_PROJECTIONS),
    "qwen2_moe": {NORM, GATE}
    | experts(MLP, 12, PROJECTIONS)
    | below(f"{MLP}shared_expert.", PROJECTIONS),
    "mixtral": {NORM, f"{SPARSE}gate.weight"} | experts(SPARSE, 8, W123),
    "minimax_text_01": {NORM, f"{SPARSE}gate.weight"} | experts(SPARSE, 8, W123),
    "minimax_m2": {NORM, f"{SPARSE}gate.weight", f"{SPARSE}e_score_correction_bias"}
    | experts(SPARSE, 16, FP8_W123),
    "gpt_oss": {NORM, f"{MLP}router.weight"}
    | below(f"{MLP}experts.gate_up_proj_", ("blocks", "scales"))
    | below(f"{MLP}experts.down_proj_", ("blocks", "scales")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_keys_of_a_layer(family: str) -> None:
    config = FIXTURES / family / "config.json"
    keys = LayerKeys(LAYOUTS[read_architecture(config)], "model.", 5)
    assert set(keys.wanted(load_hf(config))) == KEYS[family]


def test_every_known_architecture_has_a_layout() -> None:
    assert set(LAYOUTS) == set(KNOWN)


def test_shapes_of_deepseek_v3() -> None:
    config = FIXTURES / "deepseek_v3" / "config.json"
    keys = LayerKeys(LAYOUTS[read_architecture(config)], "model.", 3)
    wanted = keys.wanted(load_hf(config))
    gate, up, down = keys.matrices(0)
    assert wanted[gate].shape == wanted[up].shape == (128, 256)
    assert wanted[down].shape == (256, 128)
    assert wanted[f"{down}_scale_inv"].shape == (2, 1)
    assert wanted[keys.bias].shape == (16,)


def test_what_a_layer_here_does_not_have_is_known_by_name() -> None:
    qwen = LayerKeys(LAYOUTS["Qwen2MoeForCausalLM"], "model.", 0)
    assert qwen.ignored == {"model.layers.0.mlp.shared_expert_gate.weight"}
    gpt_oss = LayerKeys(LAYOUTS["GptOssForCausalLM"], "model.", 0)
    assert "model.layers.0.mlp.experts.down_proj_bias" in gpt_oss.ignored
