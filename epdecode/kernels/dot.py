"""Matrix products that are the same on the GPU and in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot_bfloat16(a, b, acc, WIDEN: tl.constexpr) -> tl.tensor:
    """acc + a x b, float32. The interpreter multiplies bfloat16 as integers: WIDEN there."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:  # noqa: RET505, the compiler must not see both returns
        return tl.dot(a, b, acc)
