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
def low_half(word) -> tl.tensor:
    """The first of two bfloat16 in an int32, as float32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(word) -> tl.tensor:
    """The second of two bfloat16 in an int32, as float32."""
    return (word & -65536).to(tl.float32, bitcast=True)


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
def _reciprocal(x) -> tl.tensor:
    """About 1 / x, float32, one instruction."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _scale_of(amax, RAW: tl.constexpr) -> tl.tensor:
    """amax / 448, correctly rounded."""
    if RAW:
        # The steps of the exact division, without its tests for operands that amax cannot be.
        scale = amax * 0.0022321429569274187
        scale = tl.fma(tl.fma(scale, -448.0, amax), 0.0022321429569274187, scale)
    else:
        scale = tl.div_rn(amax, 448.0)
    return scale


@triton.jit
def _factor_of(amax, RAW: tl.constexpr) -> tl.tensor:
    """448 / amax, correctly rounded."""
    if RAW:
        # As above, on amax / 256, whose reciprocal is a normal number for every bfloat16.
        part = amax * 0.00390625
        inverse = _reciprocal(part)
        inverse = tl.fma(tl.fma(-part, inverse, 1.0), inverse, inverse)
        factor = inverse * 1.75
        factor = tl.fma(tl.fma(-part, factor, 1.75), inverse, factor)
    else:
        factor = tl.div_rn(448.0, amax)
    return factor


@triton.jit
def group_scale(
    amax, UE8M0: tl.constexpr, RAW: tl.constexpr = False
) -> tuple[tl.tensor, tl.tensor]:
    """(what is stored, factor for the data) per group: float32 scale, or its exponent as a byte.

    RAW: on the GPU; the same bits either way.
    """
    amax = tl.maximum(amax, 1e-4)
    scale = _scale_of(amax, RAW)
    if UE8M0:
        exponent = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        factor = tl.maximum(254 - exponent, 0) << 23
        return exponent.to(tl.uint8), factor.to(tl.float32, bitcast=True)
    else:  # noqa: RET505, the compiler must not see both returns
        return scale, _factor_of(amax, RAW)


@triton.jit
def quantize_groups(
    values, UE8M0: tl.constexpr, RAW: tl.constexpr = False
) -> tuple[tl.tensor, tl.tensor]:
    """values float32 [N, 128] -> (e4m3 [N, 128], scale [N]: float32, or uint8 exponents).

    No clamp of its own: a product exceeds 448 by its rounding at most, and the cast saturates.
    """
    scale, factor = group_scale(tl.max(tl.abs(values), 1), UE8M0, RAW)
    return (values * factor[:, None]).to(tl.float8e4nv), scale
