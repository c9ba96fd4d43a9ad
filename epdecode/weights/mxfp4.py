"""MXFP4 (OCP Microscaling v1.0): e2m1 values in groups of 32 that share a power-of-two scale."""

from __future__ import annotations

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three low bits of an e2m1 code stand for; the fourth bit is the sign."""
EXPONENT_BIAS = 127


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 blocks [N, G, 16], two codes a byte, the low half first, and scale exponents uint8
    [N, G] -> float32 [N, 32 * G]."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=blocks.device)
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - EXPONENT_BIAS
    return torch.ldexp(values[codes.int()], exponents).flatten(-2)
