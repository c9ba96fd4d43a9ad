"""The FP8 rule in plain torch."""

from __future__ import annotations

import pytest
import torch

from epdecode.errors import ConfigError
from epdecode.kernels.fp8 import (
    dequantize,
    dequantize_block,
    mn_major_scales,
    num_groups,
    pack_ue8m0,
    quantize_block,
    quantize_ref,
    round_up_to_power_of_two,
    unpack_ue8m0,
)
from tests.kernels.kit import formats


@formats
@pytest.mark.parametrize("hidden", [128, 384, 1024])
def test_error_of_a_round_trip_is_that_of_three_mantissa_bits(scale_format, hidden):
    x = torch.randn(17, hidden) * torch.logspace(-3, 3, 17)[:, None]
    error = (dequantize(quantize_ref(x, scale_format)) - x).norm() / x.norm()
    assert 0.015 < error < 0.035


@formats
def test_zero_group_gives_zero_bytes_and_the_floor_scale(scale_format):
    x = torch.zeros(4, 256)
    x[:, 128:] = 1.0
    rows = quantize_ref(x, scale_format)
    scales = rows.scales if scale_format == "fp32" else unpack_ue8m0(rows.scales)[:, :2]
    floor, one = (2.2321429e-07, 1 / 448) if scale_format == "fp32" else (2.0**-22, 2.0**-8)
    assert (rows.data.view(torch.uint8)[:, :128] == 0).all()
    torch.testing.assert_close(scales[0], torch.tensor([floor, one]), rtol=1e-7, atol=0)
    torch.testing.assert_close(dequantize(rows), x, rtol=0.02, atol=0)


def test_ue8m0_rounds_up_before_quantising():
    rows = quantize_ref(torch.ones(1, 128), "ue8m0")
    assert rows.scales.item() == 119
    assert (rows.data.float() == 256).all()


def test_round_up_keeps_powers_of_two_and_lifts_the_rest():
    scales = torch.tensor([0.25, 0.2500001, 0.49, 0.5, 1.0, 3.0])
    want = torch.tensor([0.25, 0.5, 0.5, 0.5, 1.0, 4.0])
    assert torch.equal(round_up_to_power_of_two(scales), want)


def test_pack_puts_the_first_exponent_in_the_low_byte():
    packed = pack_ue8m0(torch.tensor([0.5, 1.0, 2.0, 4.0]))
    assert packed.tolist() == [-2122285186]
    assert unpack_ue8m0(packed).tolist() == [0.5, 1.0, 2.0, 4.0]


def test_pack_fills_a_part_word_with_zero_bytes():
    assert pack_ue8m0(torch.ones(3, 5)).tolist() == [[0x7F7F7F7F, 0x7F]] * 3


@pytest.mark.parametrize("bad", [3.0, 0.0, -1.0, 1.0000001, float("nan")])
def test_pack_refuses_what_is_not_a_power_of_two(bad):
    with pytest.raises(ConfigError, match=r"scales\[1, 2\] is .* powers of two"):
        pack_ue8m0(torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, bad]]))


@pytest.mark.parametrize("shape", [(256, 384), (2, 200, 300), (3, 1, 128), (1, 7)])
def test_blocks_are_128_by_128_and_smaller_at_the_edge(shape):
    weights = torch.randn(shape)
    rows = quantize_block(weights)
    assert rows.scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    error = (dequantize_block(rows) - weights).norm() / weights.norm()
    assert error < 0.04
    first = weights[..., :128, :128].abs().amax((-1, -2)).clamp(min=1e-4) / 448
    torch.testing.assert_close(rows.scales[..., 0, 0], first, rtol=1e-6, atol=0)


@formats
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_value_stays_non_finite(scale_format, bad):
    x = torch.randn(2, 256)
    x[1, 130] = bad
    back = dequantize(quantize_ref(x, scale_format))
    assert not back[1, 130].isfinite()
    assert back[0].isfinite().all()
    assert back[1, :128].isfinite().all()


@pytest.mark.parametrize(("size", "near"), [(200, "128 or 256"), (64, "128"), (0, "128")])
def test_a_size_that_is_not_whole_groups_is_refused_with_the_rule(size, near):
    with pytest.raises(ConfigError, match=f"multiples of 128.*nearest: {near}"):
        num_groups(size)


def test_an_unknown_scale_format_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'ue8m0'"):
        quantize_ref(torch.zeros(1, 128), "ue8mo")


@formats
@pytest.mark.parametrize("rows", [1, 4, 5, 0])
def test_scales_are_row_contiguous_padded_to_16_bytes_and_initialised(scale_format, rows):
    scales = mn_major_scales(3, rows, 6, scale_format)
    words = 6 if scale_format == "fp32" else 2
    aligned = -(-rows // 4) * 4
    assert scales.shape == (3, rows, words)
    if rows:
        assert scales.stride() == (words * aligned, 1, aligned)
        lanes = scales.as_strided((3 * words * aligned,), (1,))
        values = lanes if scale_format == "fp32" else unpack_ue8m0(lanes)
        assert (values == 1.0).all()
