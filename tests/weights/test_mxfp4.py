"""MXFP4: codes, order in a byte, exponents."""

from __future__ import annotations

import torch

from epdecode.weights.mxfp4 import MAGNITUDES, dequantize_mxfp4


def test_every_code_low_half_first() -> None:
    """Bytes 0x10, 0x32, ... hold the codes 0, 1, 2, 3, ...; exponent 127 is a scale of one."""
    codes = torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)], dtype=torch.uint8)
    blocks = torch.cat([codes, codes]).view(1, 1, 16)
    values = dequantize_mxfp4(blocks, torch.tensor([[127]], dtype=torch.uint8))
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values.shape == (1, 32)
    assert values[0].tolist() == expected * 2
    assert max(MAGNITUDES) == 6


def test_each_group_has_its_own_power_of_two() -> None:
    blocks = torch.full((2, 3, 16), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[127, 128, 120], [0, 127, 254]], dtype=torch.uint8)
    values = dequantize_mxfp4(blocks, scales).view(2, 3, 32)
    assert values[0, :, 0].tolist() == [1, 2, 2**-7]
    assert values[1, :, 5].tolist() == [2.0**-127, 1, 2.0**127]
