"""group_quant equals group_quant_ref in every layout, padding lanes included."""

from __future__ import annotations

import pytest
import torch

from epdecode.batch import Fp8Rows
from epdecode.errors import ConfigError
from epdecode.kernels.fp8 import unpack_ue8m0
from epdecode.kernels.group_quant import empty_quantized, group_quant, group_quant_ref
from tests.kernels.kit import assert_same, both, formats, poison, storage

layouts = pytest.mark.parametrize("layout", ["row", "column"])


@both
@formats
@layouts
@pytest.mark.parametrize(
    ("tokens", "hidden"), [(1, 128), (5, 640), (8, 1024), (7, 2048), (3, 384), (64, 128)]
)
def test_equals_ref(exact, scale_format, layout, tokens, hidden, device):
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    got, want = (poison(empty_quantized(x, scale_format, layout)) for _ in range(2))
    assert group_quant(x, scale_format, layout, got) is got
    group_quant_ref(x, scale_format, layout, want)
    assert_same(got, want, exact)


@pytest.mark.gpu
@formats
@layouts
@pytest.mark.parametrize("tokens", [1, 13, 128, 1000, 4097])
@pytest.mark.parametrize("hidden", [2048, 7168, 1408])
def test_served_shapes_are_byte_equal(scale_format, layout, tokens, hidden, device):
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    got, want = (poison(empty_quantized(x, scale_format, layout)) for _ in range(2))
    group_quant(x, scale_format, layout, got)
    group_quant_ref(x, scale_format, layout, want)
    assert_same(got, want, exact=True)


@both
@formats
@layouts
def test_strided_rows_give_what_their_copy_gives(exact, scale_format, layout, device):
    wide = torch.randn(6, 64 + 256, device=device).bfloat16()
    strided = group_quant(wide[:, 64:], scale_format, layout)
    copied = group_quant(wide[:, 64:].contiguous(), scale_format, layout)
    assert torch.equal(strided.data.view(torch.uint8), copied.data.view(torch.uint8))
    assert torch.equal(storage(strided.scales), storage(copied.scales))


@both
@formats
def test_padding_lanes_hold_powers_of_two_or_zero_bytes(exact, scale_format, device):
    x = torch.randn(5, 640, device=device).bfloat16()
    out = poison(empty_quantized(x, scale_format, "column"))
    group_quant(x, scale_format, "column", out)
    lanes = storage(out.scales).view(out.scales.shape[1], 8)[:, 5:]
    if scale_format == "fp32":
        assert (lanes.view(torch.float32) == torch.tensor(1e-4 / 448)).all()
    else:
        exponents = lanes.contiguous().view(torch.uint8).unique().tolist()
        assert exponents == [0, 105]
        assert (unpack_ue8m0(lanes).unique().cpu() == torch.tensor([0.0, 2.0**-22])).all()


@both
@formats
def test_a_zero_group_beside_a_full_one(exact, scale_format, device):
    x = torch.zeros(4, 256, device=device).bfloat16()
    x[:, 128:] = 1.0
    got, want = (poison(empty_quantized(x, scale_format, "row")) for _ in range(2))
    group_quant(x, scale_format, "row", got)
    group_quant_ref(x, scale_format, "row", want)
    assert_same(got, want, exact)
    assert (got.data.view(torch.uint8)[:, :128] == 0).all()


@pytest.mark.gpu
def test_a_non_finite_value_stays_non_finite(device):
    x = torch.randn(3, 256, device=device).bfloat16()
    x[1, 7], x[2, 130] = torch.nan, torch.inf
    data = group_quant(x, "fp32", "row")
    back = data.data.float() * data.scales.repeat_interleave(128, 1)
    assert back[1, 7].isnan()
    assert not back[2, 130].isfinite()
    assert back[0].isfinite().all()
    assert back[2, :128].isfinite().all()


@formats
@layouts
def test_zero_rows(scale_format, layout, device):
    out = group_quant(torch.empty(0, 256, device=device).bfloat16(), scale_format, layout)
    assert out.data.shape == (0, 256)
    assert out.scales.shape[0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65535, 65536, 65537])
@layouts
def test_grid_limits_of_narrow_rows(tokens, layout, device):
    x = torch.randn(tokens, 256, device=device).bfloat16()
    out = group_quant(x, "fp32", layout)
    last = group_quant(x[-3:], "fp32", layout)
    assert torch.equal(out.data[-3:].view(torch.uint8), last.data.view(torch.uint8))
    assert torch.equal(out.scales[-3:], last.scales)


@pytest.mark.gpu
def test_row_offsets_beyond_32_bits(device):
    x = torch.empty(524416, 4224, dtype=torch.bfloat16, device=device)[:, :4096]
    x[-256:].normal_()
    out = group_quant(x, "fp32", "column")
    last = group_quant(x[-256:].contiguous(), "fp32", "column")
    assert torch.equal(out.data[-256:].view(torch.uint8), last.data.view(torch.uint8))
    assert torch.equal(out.scales[-256:], last.scales)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 200).bfloat16()}, "hidden size is 200; accepted: multiples of 128"),
        ({"x": torch.zeros(4, 256)}, "x's dtype is torch.float32"),
        ({"x": torch.zeros(256, 4).bfloat16().T}, "x's stride"),
        ({"layout": "colum"}, "did you mean 'column'"),
        ({"scale_format": "e8m0"}, "scale_format: got 'e8m0', accepted: fp32, ue8m0"),
        ({"out": empty_quantized(torch.zeros(4, 256), "fp32", "row")}, "the scales' stride"),
        ({"out": empty_quantized(torch.zeros(4, 256), "ue8m0")}, "the scales' dtype"),
        ({"out": empty_quantized(torch.zeros(5, 256))}, "out.data's shape"),
    ],
)
def test_what_cannot_run_is_refused(change, message):
    given = {
        "x": torch.zeros(4, 256).bfloat16(),
        "scale_format": "fp32",
        "layout": "column",
        "out": None,
    } | change
    with pytest.raises(ConfigError, match=message):
        group_quant(given["x"], given["scale_format"], given["layout"], given["out"])


def test_scales_of_a_wrong_column_stride_are_refused():
    x = torch.zeros(5, 256).bfloat16()
    scales = torch.zeros(2, 5).T
    with pytest.raises(ConfigError, match="rows padded to 4"):
        group_quant(x, out=Fp8Rows(torch.empty(5, 256, dtype=torch.float8_e4m3fn), scales))
