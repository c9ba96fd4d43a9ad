"""A checkpoint that does not fit is refused before anything is allocated, key by key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from epdecode.config.load import find_checkpoint, load_config
from epdecode.errors import ConfigError
from epdecode.models.hf import load_hf
from epdecode.weights.checkpoint import INDEX, Checkpoint, check_layers
from tests.checkpoints import FAMILIES, FIXTURES, config_of, maker, save, small_deepseek

Tensors = dict[str, torch.Tensor]
FIVE = "model.layers.3.mlp.experts.5.gate_proj.weight"


def checked(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint(folder)
    check_layers(checkpoint, checkpoint.shape, [3])
    return checkpoint


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        checked(folder)
    return str(error.value)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "kimi_k2_5"])
def test_a_made_checkpoint_of_every_family_fits(tmp_path: Path, family: str) -> None:
    maker().make(FIXTURES / family / "config.json", tmp_path, shards=2)
    checkpoint = Checkpoint(tmp_path)
    check_layers(checkpoint, checkpoint.shape, checkpoint.shape.moe_layers[:2])


def test_a_multimodal_checkpoint_is_found_below_its_language_model(tmp_path: Path) -> None:
    config_of(tmp_path, "kimi_k2_5")
    other = tmp_path / "text"
    tensors = maker().make(FIXTURES / "kimi_k2" / "config.json", other, layers=[1])
    save(tmp_path, {f"language_model.{key}": tensor for key, tensor in tensors.items()})
    checkpoint = Checkpoint(tmp_path)
    check_layers(checkpoint, checkpoint.shape, [1])
    assert checkpoint.layer(1).gate == "language_model.model.layers.1.mlp.gate.weight"


def without(key: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[key]

    return change


def with_shape(key: str, *shape: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[key] = torch.zeros(shape).to(tensors[key].dtype)

    return change


def as_bf16(tensors: Tensors) -> None:
    tensors[FIVE] = tensors[FIVE].to(torch.bfloat16)


def with_extra(tensors: Tensors) -> None:
    tensors["model.layers.3.mlp.experts.8.gate_proj.weight"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{FIVE}_scale_inv"), f"{FIVE}_scale_inv: missing; expected F32 or BF16 [1, 2]"),
        (without(FIVE), f"{FIVE}: missing; expected F8_E4M3 [128, 256]"),
        (
            without("model.layers.3.mlp.gate.e_score_correction_bias"),
            "model.layers.3.mlp.gate.e_score_correction_bias: missing; expected BF16 or F16 or F32",
        ),
        (
            with_shape(f"{FIVE}_scale_inv", 2, 1),
            f"{FIVE}_scale_inv: got F32 [2, 1]; expected F32 or BF16 [1, 2]",
        ),
        (with_shape(FIVE, 256, 128), f"{FIVE}: got F8_E4M3 [256, 128]; expected F8_E4M3 [128, 25"),
        (as_bf16, f"{FIVE}: got BF16 [128, 256]; expected F8_E4M3 [128, 256]"),
        (with_extra, "model.layers.3.mlp.experts.8.gate_proj.weight: unknown; nothing of the lay"),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    tensors = small_deepseek(tmp_path)
    change(tensors)
    save(tmp_path, tensors)
    text = refused(tmp_path)
    assert f"weights: {tmp_path} does not fit:" in text
    assert message in text


def test_what_lies_outside_the_moe_block_is_nobodys_business(tmp_path: Path) -> None:
    tensors = small_deepseek(tmp_path)
    tensors["model.layers.3.self_attn.o_proj.weight"] = torch.zeros(1)
    tensors["model.layers.2.mlp.gate_proj.weight"] = torch.zeros(1)
    checked(save(tmp_path, tensors))


def test_many_problems_are_counted_not_all_shown(tmp_path: Path) -> None:
    tensors = small_deepseek(tmp_path)
    for key in [key for key in tensors if ".experts." in key]:
        del tensors[key]
    assert "... and 36 more" in refused(save(tmp_path, tensors))


def test_another_model_is_refused_by_its_fields(tmp_path: Path) -> None:
    save(tmp_path, small_deepseek(tmp_path))
    model = load_hf(FIXTURES / "deepseek_v3" / "config.json")
    with pytest.raises(ConfigError) as error:
        check_layers(Checkpoint(tmp_path), model, [3])
    assert "config.json: num_experts is 8; model deepseek_v3 has 16" in str(error.value)
    assert "config.json: top_k is 2; model deepseek_v3 has 4" in str(error.value)


def write_index(folder: Path, weight_map: object) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_an_index_that_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    tensors = small_deepseek(tmp_path)
    write_index(tmp_path, dict.fromkeys(tensors, "a.safetensors"))
    assert re.search(r"no .*a\.safetensors, which model\.safetensors\.index", refused(tmp_path))


def test_an_index_that_names_a_file_without_the_tensor(tmp_path: Path) -> None:
    tensors = small_deepseek(tmp_path)
    write_index(save(tmp_path, {"x": torch.zeros(1)}), dict.fromkeys(tensors, "model.safetensors"))
    assert "is in model.safetensors, which does not hold it" in refused(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [{"a": "../x.safetensors"}, {"a": "/etc/x"}, ["a"], {"a": 1}]
)
def test_an_index_may_name_files_beside_it_only(tmp_path: Path, weight_map: object) -> None:
    small_deepseek(tmp_path)
    text = refused(write_index(tmp_path, weight_map))
    assert "accepted: names of files beside it, one per key" in text


def test_an_index_that_is_no_index(tmp_path: Path) -> None:
    small_deepseek(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    assert "is no index with a weight_map" in refused(tmp_path)


@pytest.mark.parametrize("cut", [4, 200, 5000])
def test_a_file_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    path = save(tmp_path, small_deepseek(tmp_path)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert "model.safetensors cannot be read" in refused(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    small_deepseek(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    assert "(pickled .bin and .pt files are never read)" in refused(tmp_path)


def test_a_folder_without_config_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf download ORG/NAME --local-dir"):
        Checkpoint(tmp_path)


def test_the_folder_is_the_models_own_or_weights_path(tmp_path: Path) -> None:
    config_of(tmp_path / "m", "mixtral")
    own = load_config(None, [f"model={tmp_path}/m", "weights.source=checkpoint"])
    assert find_checkpoint(own) == tmp_path / "m"
    near = tmp_path / "x.yaml"
    named = load_config(None, ["weights={source: checkpoint, path: m}"])
    assert find_checkpoint(named, near) == tmp_path / "m"
    with pytest.raises(ConfigError, match=r"weights.path: got 'm', accepted: an existing path"):
        find_checkpoint(named)
    shape_file = load_config(None, ["weights.source=checkpoint"])
    with pytest.raises(ConfigError, match="model 'tiny' is a shape file without weights"):
        find_checkpoint(shape_file)
