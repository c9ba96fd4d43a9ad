"""Arithmetic shared by the quantising kernels, each beside the plain torch that gives its bits.

On CUDA torch.exp2 and torch.rsqrt are the hardware's own instructions, the ones Triton emits, and
a square of rsqrt takes one instruction where an exact division takes about ten; with the products
in the same order the twins agree to the last bit, so the FP8 bytes do too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def sigmoid(x) -> tl.tensor:
    """1 / (1 + exp(-x)), float32; 0 where exp overflows."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


def sigmoid_ref(x: torch.Tensor) -> torch.Tensor:
    """The same bits on CUDA; within 4 units in the last place of torch.sigmoid."""
    root = torch.rsqrt(1.0 + torch.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def silu_mul(gate, up) -> tl.tensor:
    """silu(gate) * up, float32."""
    return gate * sigmoid(gate) * up


def silu_mul_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, float32."""
    return gate * sigmoid_ref(gate) * up


@triton.jit
def group_scale(amax, UE8M0: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(what is stored, factor for the data) per group: float32 scale, or its exponent as a byte."""
    amax = tl.maximum(amax, 1e-4)
    scale = tl.div_rn(amax, 448.0)
    if UE8M0:
        exponent = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        factor = tl.maximum(254 - exponent, 0) << 23
        return exponent.to(tl.uint8), factor.to(tl.float32, bitcast=True)
    else:  # noqa: RET505, the compiler must not see both returns
        return scale, tl.div_rn(448.0, amax)


@triton.jit
def quantize_groups(values, UE8M0: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """values float32 [N, 128] -> (e4m3 [N, 128], scale [N]: float32, or uint8 exponents)."""
    scale, factor = group_scale(tl.max(tl.abs(values), 1), UE8M0)
    scaled = values * factor[:, None]
    scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv), scale
