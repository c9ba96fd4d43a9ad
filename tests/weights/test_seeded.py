"""Seeded weights: the same wherever an expert is; and how a matrix is put into its place."""

from __future__ import annotations

import pytest
import torch

from epdecode.batch import Fp8Rows, Rows
from epdecode.kernels.fp8 import dequantize_block, quantize_block
from epdecode.weights.seeded import SeededWeights, has_nan, part, put, put_expert, unwritten
from tests.small import small_model

CPU = torch.device("cpu")


def seeded(plain_size: int = 256, **fields: object) -> SeededWeights:
    return SeededWeights(small_model(**fields), plain_size, 0, CPU)


def parts(rows: Rows) -> list[torch.Tensor]:
    return [rows.data.view(torch.uint8), rows.scales] if isinstance(rows, Fp8Rows) else [rows]


def same(a: Rows, b: Rows) -> bool:
    return all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


def test_an_expert_is_the_same_on_whatever_rank_and_place() -> None:
    weights = seeded()
    whole = weights.layer(0, range(8)).experts
    there = weights.layer(0, [5, 2, 5]).experts
    for slot, expert in enumerate([5, 2, 5]):
        for name in ("gate_up", "down"):
            mine, all_of_them = getattr(there, name), getattr(whole, name)
            rows = mine.data.shape[1]
            assert same(part(mine, slot, 0, rows), part(all_of_them, expert, 0, rows))


def test_layers_seeds_and_experts_differ() -> None:
    first = seeded().layer(0, [0, 1])
    assert not torch.equal(first.gate, seeded().layer(1, []).gate)
    other = SeededWeights(small_model(), 256, 1, CPU).layer(0, [])
    assert not torch.equal(first.gate, other.gate)
    assert not torch.equal(*first.experts.down.data.view(torch.uint8))


@pytest.mark.parametrize("weight_format", ["fp8_block128", "bf16"])
def test_what_nobody_wrote_is_found(weight_format: str) -> None:
    model = small_model(weight_format=weight_format)
    experts = unwritten(3, model, 256, CPU)
    assert has_nan(experts.gate_up).tolist() == [True] * 3
    full = torch.ones(256, 256)
    put_expert(experts, 1, full, full, full)
    assert has_nan(experts.gate_up).tolist() == [True, False, True]
    assert has_nan(experts.down).tolist() == [True, False, True]


def test_a_scale_nobody_wrote_is_found() -> None:
    rows = quantize_block(torch.ones(2, 256, 256))
    rows.scales[1, 0, 1] = torch.nan
    assert has_nan(rows).tolist() == [False, True]


@pytest.mark.parametrize("stored", ["float", "fp8"])
def test_gate_and_up_are_padded_apart(stored: str) -> None:
    """192 rows each: 256 after padding, so that block row 1 is gate's alone and 2 is up's."""
    model = small_model(expert_size=256)
    experts = unwritten(1, model, 256, CPU)
    gate, up = torch.full((192, 256), 2.0), torch.full((192, 256), 1000.0)
    down = torch.full((256, 192), 3.0)
    as_stored = quantize_block if stored == "fp8" else torch.Tensor.clone
    put_expert(experts, 0, as_stored(gate), as_stored(up), as_stored(down))
    assert not has_nan(experts.gate_up).any()
    assert not has_nan(experts.down).any()
    both = dequantize_block(experts.gate_up)[0]
    torch.testing.assert_close(both[:192], gate)
    torch.testing.assert_close(both[256:448], up)
    assert (both[192:256] == 0).all()
    assert (both[448:] == 0).all()
    back = dequantize_block(experts.down)[0]
    torch.testing.assert_close(back[:, :192], down)
    assert (back[:, 192:] == 0).all()


def test_fp8_goes_into_bf16_by_its_scale() -> None:
    """The scale multiplies: without it the values would be hundreds of times too large."""
    stored = Fp8Rows(torch.full((128, 128), 448.0).to(torch.float8_e4m3fn), torch.tensor([[0.5]]))
    target = torch.full((128, 128), torch.nan, dtype=torch.bfloat16)
    put(target, stored)
    assert (target == 224).all()


def test_seeded_values_do_not_depend_on_padding() -> None:
    plain = SeededWeights(small_model(expert_size=192, weight_format="bf16"), 192, 0, CPU)
    padded = SeededWeights(small_model(expert_size=256), 192, 0, CPU)
    own, wide = plain.layer(0, [3]), padded.layer(0, [3])
    torch.testing.assert_close(
        dequantize_block(wide.experts.down)[0, :, :192],
        own.experts.down[0].float(),
        rtol=2**-3,
        atol=1e-3,
    )
    assert own.shared is not None
    assert wide.shared is not None
    assert own.shared.down.shape == (1, 256, 192)
    assert wide.shared.down.data.shape == (1, 256, 256)
    assert not has_nan(wide.shared.gate_up).any()
