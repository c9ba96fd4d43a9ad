"""Weights from a checkpoint: the right experts, multiplied by their scales, nothing left unread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from epdecode.batch import Fp8Rows, Rows
from epdecode.build import build
from epdecode.errors import ConfigError
from epdecode.experts.reference import plain_weights
from epdecode.inputs import make_batches
from epdecode.models import ModelShape
from epdecode.models.hf import load_hf
from epdecode.plan import make_plan
from epdecode.sources import Sources
from epdecode.verify import verify_step
from epdecode.weights.checkpoint import Checkpoint, check_layers
from epdecode.weights.load import CheckpointWeights
from epdecode.weights.mxfp4 import dequantize_mxfp4
from epdecode.weights.seeded import LayerWeights, SeededWeights
from epdecode.world import World
from tests.checkpoints import FIXTURES, config_of, maker, save, small_deepseek
from tests.ranks import RankFailed, run_ranks
from tests.small import small_config

CPU = torch.device("cpu")
SEEDED = ["deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2", "mixtral", "qwen2_moe"]
FIVE = "model.layers.3.mlp.experts.5.gate_proj.weight"


def load(folder: Path, model: ModelShape, layer: int, experts: list[int]) -> LayerWeights:
    with CheckpointWeights(Checkpoint(folder), model, CPU, lambda more: None) as source:
        return source.layer(layer, experts)


def bits(rows: Rows | None) -> list[torch.Tensor]:
    if rows is None:
        return []
    return [rows.data.view(torch.uint8), rows.scales] if isinstance(rows, Fp8Rows) else [rows]


def assert_same(a: LayerWeights, b: LayerWeights) -> None:
    pairs = [(a.norm, b.norm), (a.gate, b.gate), (a.bias, b.bias)]
    for x, y in ((a.experts, b.experts), (a.shared, b.shared)):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            pairs += [(x.gate_up, y.gate_up), (x.down, y.down)]
    for left, right in pairs:
        assert len(bits(left)) == len(bits(right))
        for one, other in zip(bits(left), bits(right), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("family", SEEDED)
def test_what_was_made_from_seeds_is_read_back(tmp_path: Path, family: str) -> None:
    maker().make(FIXTURES / family / "config.json", tmp_path, shards=3)
    shape = load_hf(tmp_path / "config.json")
    layer, experts = shape.moe_layers[1], [6, 1, 6]
    seeded = SeededWeights(shape, shape.expert_size, 0, CPU).layer(layer, experts)
    assert_same(load(tmp_path, shape, layer, experts), seeded)


def test_an_expert_size_that_is_no_multiple_of_128(tmp_path: Path) -> None:
    """Scales of half-full blocks, and two shared experts that are wider than their padding."""
    config = config_of(tmp_path, "deepseek_v3", moe_intermediate_size=192, n_shared_experts=2)
    maker().make(config, tmp_path)
    shape = load_hf(config)
    check_layers(Checkpoint(tmp_path), shape, [3, 4])
    padded = replace(shape, expert_size=256)
    assert_same(
        load(tmp_path, padded, 3, [0, 9]),
        SeededWeights(padded, 192, 0, CPU).layer(3, [0, 9]),
    )


def two_ranks(world: World, folder: str) -> tuple[list[float], list[float], float]:
    """Values of this rank's gate and down matrices, and of the shared expert's."""
    checkpoint = Checkpoint(Path(folder))
    config = small_config("weights.source=checkpoint", "layers=[3]")
    plan = make_plan(config, checkpoint.shape, world.size)
    check_layers(checkpoint, checkpoint.shape, [3])
    runtime = build(config, plan, world, Sources(checkpoint))
    experts, shared = runtime.weights[0].experts, runtime.weights[0].shared
    assert shared is not None
    gate_up, down = plain_weights(experts.gate_up), plain_weights(experts.down)
    assert (gate_up.flatten(1) == gate_up[:, :1, 0]).all()
    assert (down.flatten(1) == down[:, :1, 0]).all()
    assert runtime.loading.bytes > 0
    one = plain_weights(shared.gate_up)[0, 0, 0]
    return gate_up[:, 0, 0].tolist(), down[:, 0, 0].tolist(), float(one)


def test_each_rank_reads_its_own_experts_times_their_scales(tmp_path: Path) -> None:
    save(tmp_path, small_deepseek(tmp_path))
    results = run_ranks(2, two_ranks, str(tmp_path))
    for rank, (gate_up, down, shared) in enumerate(results):
        assert gate_up == [expert / 2 for expert in range(4 * rank, 4 * rank + 4)]
        assert down == gate_up
        assert shared == 4.0


def test_a_missing_scale_stops_every_rank_also_the_one_without_that_expert(tmp_path: Path) -> None:
    tensors = small_deepseek(tmp_path)
    del tensors[f"{FIVE}_scale_inv"]
    save(tmp_path, tensors)
    with pytest.raises(RankFailed, match=r"experts\.5\.gate_proj\.weight_scale_inv: missing"):
        run_ranks(2, two_ranks, str(tmp_path))
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="weight_scale_inv: missing"):
        check_layers(checkpoint, checkpoint.shape, [3])


@pytest.mark.parametrize("where", [FIVE, f"{FIVE}_scale_inv"])
def test_nan_in_the_file_is_named(tmp_path: Path, where: str) -> None:
    tensors = small_deepseek(tmp_path)
    tensors[where].view(torch.uint8).fill_(0xFF)
    save(tmp_path, tensors)
    with pytest.raises(ConfigError, match=r"experts\.5\.gate_proj\.weight .*holds NaN or infinite"):
        load(tmp_path, load_hf(tmp_path / "config.json"), 3, [4, 5])
    load(tmp_path, load_hf(tmp_path / "config.json"), 3, [4])


def test_bf16_is_quantised_on_load_and_fp8_is_kept_or_dequantised(tmp_path: Path) -> None:
    config = FIXTURES / "deepseek_v2" / "config.json"
    maker().make(config, tmp_path / "bf16")
    shape = load_hf(config)
    kept = load(tmp_path / "bf16", shape, 1, [2]).experts.down
    quantised = load(
        tmp_path / "bf16", replace(shape, weight_format="fp8_block128"), 1, [2]
    ).experts.down
    assert isinstance(kept, torch.Tensor)
    assert isinstance(quantised, Fp8Rows)
    torch.testing.assert_close(plain_weights(quantised), kept.float(), rtol=2**-4, atol=2e-4)

    maker().make(FIXTURES / "deepseek_v3" / "config.json", tmp_path / "fp8")
    shape = load_hf(tmp_path / "fp8" / "config.json")
    fp8 = load(tmp_path / "fp8", shape, 3, [2]).experts.down
    plain = load(tmp_path / "fp8", replace(shape, weight_format="bf16"), 3, [2]).experts.down
    assert isinstance(plain, torch.Tensor)
    assert torch.equal(plain, plain_weights(fp8).to(torch.bfloat16))


def test_stacked_mxfp4_rows_alternate_between_gate_and_up(tmp_path: Path) -> None:
    tensors = maker().make(FIXTURES / "gpt_oss" / "config.json", tmp_path)
    shape = load_hf(tmp_path / "config.json")
    experts = load(tmp_path, shape, 1, [7, 0]).experts
    root = "model.layers.1.mlp.experts."
    for slot, expert in enumerate((7, 0)):
        both = dequantize_mxfp4(
            tensors[f"{root}gate_up_proj_blocks"][expert],
            tensors[f"{root}gate_up_proj_scales"][expert],
        ).to(torch.bfloat16)
        size = shape.expert_size
        assert torch.equal(experts.gate_up[slot, :size], both[0::2])
        assert torch.equal(experts.gate_up[slot, size:], both[1::2])
        down = dequantize_mxfp4(
            tensors[f"{root}down_proj_blocks"][expert], tensors[f"{root}down_proj_scales"][expert]
        )
        assert torch.equal(experts.down[slot], down.to(torch.bfloat16))
        assert 0.5 < float(both.float().pow(2).sum(1).mean()) < 2, "about unit gain"


def verified(world: World, folder: str, overrides: list[str]) -> tuple[bool, int]:
    checkpoint = Checkpoint(Path(folder))
    config = small_config("weights.source=checkpoint", "batch.vary=false", *overrides)
    plan = make_plan(config, checkpoint.shape, world.size)
    check_layers(checkpoint, checkpoint.shape, [layer.number for layer in plan.loop_layers])
    runtime = build(config, plan, world, Sources(checkpoint))
    result = verify_step(runtime, runtime.step(), make_batches(config, plan, world)[:2])
    runtime.close()
    return result.passed, result.rows


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("deepseek_v3", []),
        ("deepseek_v3", ["layers=[4]", "transport.wire=bf16"]),
        ("deepseek_v3", ["weights.format=bf16"]),
        ("qwen2_moe", []),
        ("qwen2_moe", ["weights.format=fp8_block128"]),
        ("mixtral", ["transport.wire=bf16"]),
        ("minimax_m2", []),
        ("qwen3_moe", ["parallel.stand_in_ep=4"]),
        ("deepseek_v3", ["experts.placement=balanced", "experts.redundant=4"]),
        ("gpt_oss", ["transport.wire=bf16"]),
    ],
)
def test_a_run_from_a_checkpoint_is_right(
    tmp_path: Path, family: str, overrides: list[str]
) -> None:
    maker().make(FIXTURES / family / "config.json", tmp_path, shards=2)
    for passed, rows in run_ranks(2, verified, str(tmp_path), overrides):
        assert passed
        assert rows >= 2 * 2 * 16


def test_padded_experts_run_right(tmp_path: Path) -> None:
    config = config_of(tmp_path, "deepseek_v3", moe_intermediate_size=192)
    maker().make(config, tmp_path)
    assert run_ranks(2, verified, str(tmp_path), [])[0][0]
