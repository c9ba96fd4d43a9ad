"""gate_up_swiglu and down equal plain torch over valid rows and touch no other row.

Rows past a count are NaN on the way in and a known value on the way out.
"""

from __future__ import annotations

import pytest
import torch

from epdecode.batch import Fp8Rows
from epdecode.kernels.expert_quant import quantize_rows, quantize_rows_ref
from epdecode.kernels.fp8 import (
    dequantize,
    dequantize_block,
    mn_major_scales,
    quantize_block,
    quantize_ref,
)
from epdecode.kernels.grouped_gemm import Tile, down, gate_up_swiglu
from tests.kernels.kit import both, quantized_difference

HIDDEN, SIZE, CAPACITY = 256, 128, 32
COUNTS = [[5, 0, 17], [0, 0, 0], [32, 1, 16], [0, 0, 9]]


def poisoned_rows(counts, width, device, scale_format="fp32"):
    """Quantised random rows; NaN bytes and NaN (or largest exponent) scales past each count."""
    shape = (len(counts), CAPACITY, width)
    data = torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = mn_major_scales(len(counts), CAPACITY, width // 128, scale_format, device)
    scales.fill_(torch.nan if scale_format == "fp32" else 0x7FFFFFFF)
    for expert, count in enumerate(counts):
        made = quantize_ref(torch.randn(count, width, device=device), scale_format)
        data[expert, :count] = made.data
        scales[expert, :count] = made.scales
    return Fp8Rows(data, scales)


def weights(experts, rows, columns, device):
    return quantize_block(torch.randn(experts, rows, columns, device=device) / columns**0.5)


def empty_act(experts, device):
    data = torch.full((experts, CAPACITY, SIZE), 0x55, dtype=torch.uint8, device=device)
    scales = mn_major_scales(experts, CAPACITY, SIZE // 128, "fp32", device).fill_(-3.0)
    return Fp8Rows(data.view(torch.float8_e4m3fn), scales)


def relative(got, want):
    return ((got.float() - want).norm() / want.norm()).item() if want.numel() else 0.0


def swiglu_of(rows, gate_up):
    gate, up = (rows @ gate_up.T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@both
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_gate_up_swiglu_fp8(exact, counts, scale_format, device):
    x = poisoned_rows(counts, HIDDEN, device, scale_format)
    w = weights(3, 2 * SIZE, HIDDEN, device)
    act = empty_act(3, device)
    on_device = torch.tensor(counts, dtype=torch.int32, device=device)
    gate_up_swiglu(x, w, on_device, act, Tile(tokens=16, stages=2))
    for expert, count in enumerate(counts):
        want = swiglu_of(dequantize(x)[expert, :count], dequantize_block(w)[expert])
        # The interpreter truncates e4m3 casts.
        assert relative(dequantize(act)[expert, :count], want) < (0.04 if exact else 0.2)
        assert (act.data.view(torch.uint8)[expert, count:] == 0x55).all()
        assert (act.scales[expert, count:] == -3.0).all()
        if scale_format == "ue8m0" and count:
            assert (torch.frexp(act.scales[expert, :count]).mantissa == 0.5).all()


@both
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("rows", [64, 128])
def test_down_fp8(exact, counts, rows, device):
    act = poisoned_rows(counts, SIZE, device)
    w = weights(3, HIDDEN, SIZE, device)
    out = torch.full((3, CAPACITY, HIDDEN), 7.0, dtype=torch.bfloat16, device=device)
    on_device = torch.tensor(counts, dtype=torch.int32, device=device)
    down(act, w, on_device, out, Tile(rows=rows, tokens=16, stages=2))
    for expert, count in enumerate(counts):
        want = dequantize(act)[expert, :count] @ dequantize_block(w)[expert].T
        assert relative(out[expert, :count], want) < 5e-3
        assert (out[expert, count:] == 7.0).all()


@both
@pytest.mark.parametrize("counts", COUNTS)
def test_bfloat16_chain(exact, counts, device):
    def draw(*shape):
        return (torch.randn(*shape, device=device) / shape[-1] ** 0.5).bfloat16()

    x = draw(3, CAPACITY, HIDDEN) * 16
    for expert, count in enumerate(counts):
        x[expert, count:] = torch.nan
    w1, w2 = draw(3, 2 * SIZE, HIDDEN), draw(3, HIDDEN, SIZE)
    act = torch.full((3, CAPACITY, SIZE), torch.nan, dtype=torch.bfloat16, device=device)
    out = torch.full((3, CAPACITY, HIDDEN), 7.0, dtype=torch.bfloat16, device=device)
    on_device = torch.tensor(counts, dtype=torch.int32, device=device)
    gate_up_swiglu(x, w1, on_device, act, Tile(tokens=32, stages=2))
    down(act, w2, on_device, out, Tile(tokens=32, stages=2))
    for expert, count in enumerate(counts):
        want = swiglu_of(x[expert, :count].float(), w1[expert].float())
        assert relative(act[expert, :count], want) < (5e-3 if exact else 2e-2)
        assert relative(out[expert, :count], want @ w2[expert].float().T) < (
            1e-2 if exact else 3e-2
        )
        assert (out[expert, count:] == 7.0).all()


@both
@pytest.mark.parametrize("counts", COUNTS)
def test_quantize_rows(exact, counts, device):
    x = torch.randn(3, CAPACITY, HIDDEN, device=device).bfloat16()
    for expert, count in enumerate(counts):
        x[expert, count:] = torch.nan
    on_device = torch.tensor(counts, dtype=torch.int32, device=device)
    got, want = (poisoned_rows([0, 0, 0], HIDDEN, device) for _ in range(2))
    quantize_rows(x, on_device, got)
    quantize_rows_ref(x, on_device, want)
    for expert, count in enumerate(counts):
        pair = [
            Fp8Rows(rows.data[expert, :count], rows.scales[expert, :count]) for rows in (got, want)
        ]
        assert count == 0 or quantized_difference(*pair, exact) == ""
        assert (got.data.view(torch.uint8)[expert, count:] == 0x7F).all()
        assert got.scales[expert, count:].isnan().all()
