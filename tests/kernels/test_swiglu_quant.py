"""swiglu_quant equals swiglu_quant_ref, whatever the load, the layout and the padding."""

from __future__ import annotations

import pytest
import torch

from epdecode.batch import Fp8Rows
from epdecode.errors import ConfigError
from epdecode.kernels.fp8 import dequantize
from epdecode.kernels.swiglu_quant import (
    empty_out,
    empty_out_packed,
    swiglu_quant,
    swiglu_quant_packed,
    swiglu_quant_packed_ref,
    swiglu_quant_ref,
)
from tests.kernels.kit import assert_same, both, formats, poison

LOADS = {
    "even": [2, 2, 2, 2],
    "skew": [7, 1, 0, 3],
    "one-hot": [0, 0, 7, 0],
    "full": [7, 7, 7, 7],
    "none": [0, 0, 0, 0],
}


def masked(counts: list[int], capacity: int, size: int, device: torch.device):
    """gate_up whose padding is NaN, and counts."""
    x = torch.randn(len(counts), capacity, 2 * size, device=device).bfloat16()
    for expert, rows in enumerate(counts):
        x[expert, rows:] = torch.nan
    return x, torch.tensor(counts, dtype=torch.int32, device=device)


@both
@formats
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("size", [128, 384, 1024])
def test_masked_equals_ref(exact, scale_format, load, size, device):
    x, counts = masked(LOADS[load], 7, size, device)
    got, want = (poison(empty_out(4, 7, size, scale_format, device)) for _ in range(2))
    swiglu_quant(x, counts, got, scale_format)
    swiglu_quant_ref(x, counts, want, scale_format)
    assert_same(got, want, exact)


@both
@formats
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("alignment", [1, 16])
def test_packed_equals_ref(exact, scale_format, load, alignment, device):
    _, counts = masked(LOADS[load], 7, 128, device)
    rows = sum(-(-count // alignment) * alignment for count in LOADS[load]) + 5
    x = torch.randn(rows, 512, device=device).bfloat16()
    got, want = (poison(empty_out_packed(rows, 256, scale_format, device)) for _ in range(2))
    swiglu_quant_packed(x, counts, alignment, got, scale_format)
    swiglu_quant_packed_ref(x, counts, alignment, want, scale_format)
    assert_same(got, want, exact)


@both
def test_one_row_one_expert(exact, device):
    x, counts = masked([1], 1, 128, device)
    got, want = (poison(empty_out(1, 1, 128, device=device)) for _ in range(2))
    swiglu_quant(x, counts, got)
    swiglu_quant_ref(x, counts, want)
    assert_same(got, want, exact)


@pytest.mark.gpu
@formats
@pytest.mark.parametrize(
    ("experts", "capacity", "size", "most"),
    [(32, 64, 2048, 64), (256, 16, 2048, 16), (9, 128, 1536, 100), (16, 64, 768, 64)],
)
def test_served_shapes_are_byte_equal(scale_format, experts, capacity, size, most, device):
    counts = torch.randint(0, most + 1, (experts,)).tolist()
    x, on_device = masked(counts, capacity, size, device)
    got, want = (poison(empty_out(experts, capacity, size, scale_format, device)) for _ in "ab")
    swiglu_quant(x, on_device, got, scale_format)
    swiglu_quant_ref(x, on_device, want, scale_format)
    assert_same(got, want, exact=True)


@pytest.mark.gpu
def test_row_offsets_beyond_32_bits(device):
    rows, double = 524416, 4096
    x = torch.empty(1, rows, double, dtype=torch.bfloat16, device=device)
    x[:, -256:].normal_()
    counts = torch.tensor([rows], dtype=torch.int32, device=device)
    got = swiglu_quant(x, counts, empty_out(1, rows, double // 2, device=device))
    few = torch.tensor([256], dtype=torch.int32, device=device)
    want = swiglu_quant(
        x[:, -256:].contiguous(), few, empty_out(1, 256, double // 2, device=device)
    )
    assert torch.equal(got.data[:, -256:].view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(got.scales[:, -256:], want.scales)


@both
def test_counts_can_change_under_a_fixed_launch(exact, device):
    x = torch.randn(3, 5, 256, device=device).bfloat16()
    counts = torch.zeros(3, dtype=torch.int32, device=device)
    for load in ([5, 0, 1], [0, 0, 0], [1, 5, 5]):
        counts.copy_(torch.tensor(load))
        got, want = (poison(empty_out(3, 5, 128, device=device)) for _ in range(2))
        swiglu_quant(x, counts, got)
        swiglu_quant_ref(x, counts, want)
        assert_same(got, want, exact)


@both
def test_scales_may_have_any_strides(exact, device):
    x, counts = masked([3, 1], 4, 256, device)
    data = empty_out(2, 4, 256, device=device).data
    row_major = Fp8Rows(data, torch.zeros(2, 4, 2, device=device))
    want = swiglu_quant_ref(x, counts, empty_out(2, 4, 256, device=device))
    swiglu_quant(x, counts, row_major)
    torch.testing.assert_close(row_major.scales[0, :3], want.scales[0, :3], rtol=1e-6, atol=0)
    if exact:
        assert torch.equal(row_major.scales[0, :3], want.scales[0, :3])


@both
@formats
def test_gate_of_zero_gives_zero_bytes_and_a_positive_scale(exact, scale_format, device):
    x = torch.zeros(1, 2, 256, device=device).bfloat16()
    x[..., 128:] = 3.0
    counts = torch.tensor([2], dtype=torch.int32, device=device)
    out = swiglu_quant(x, counts, poison(empty_out(1, 2, 128, scale_format, device)), scale_format)
    assert (dequantize(out) == 0).all()
    assert (out.scales > 0).all()


@both
def test_extreme_gates_neither_overflow_nor_vanish(exact, device):
    x = torch.ones(1, 1, 256, device=device).bfloat16()
    x[0, 0, :4] = torch.tensor([-300.0, -20.0, 300.0, 3e38])
    counts = torch.ones(1, dtype=torch.int32, device=device)
    out = dequantize(swiglu_quant(x, counts, empty_out(1, 1, 128, device=device)))
    assert out.isfinite().all()
    torch.testing.assert_close(out[0, 0, 3], torch.tensor(3e38, device=device), rtol=0.05, atol=0)


def test_zero_capacity_launches_nothing(device):
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    out = empty_out(2, 0, 128, device=device)
    assert swiglu_quant(torch.empty(2, 0, 256, device=device).bfloat16(), counts, out) is out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 4, 400).bfloat16()}, "expert size .* is 200; accepted: multiples"),
        ({"x": torch.zeros(2, 4, 256)}, "gate_up's dtype is torch.float32; accepted: bfloat16"),
        ({"x": torch.zeros(2, 8, 256).bfloat16()[:, ::2]}, "gate_up's stride"),
        ({"x": torch.zeros(8, 256).bfloat16()}, "gate_up's rank is 2"),
        ({"counts": torch.zeros(2, dtype=torch.int64)}, "counts' dtype is torch.int64"),
        ({"counts": torch.zeros(3, dtype=torch.int32)}, "counts' shape"),
        ({"out": empty_out(2, 5, 128, device="cpu")}, "out.data's shape"),
        ({"out": empty_out(2, 4, 128, "ue8m0", "cpu")}, "scales' dtype is torch.int32"),
    ],
)
def test_what_cannot_run_is_refused(change, message):
    given = {
        "x": torch.zeros(2, 4, 256).bfloat16(),
        "counts": torch.zeros(2, dtype=torch.int32),
        "out": empty_out(2, 4, 128, device="cpu"),
    } | change
    with pytest.raises(ConfigError, match=message):
        swiglu_quant(given["x"], given["counts"], given["out"])
