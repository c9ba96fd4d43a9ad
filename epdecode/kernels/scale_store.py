"""Stores the scales of quantised groups without making the program's warps meet.

tl.store would move a short vector into a layout of its own through shared memory, two barriers a
step. The lanes of a group all hold its scale, so each writes it where it stands: same address,
same value, one transaction. PTX for that, since Triton has no such store; RAW = False (the
interpreter) uses tl.store.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _put_word(at, value, real) -> None:
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [at.to(tl.int64), value.to(tl.int32, bitcast=True), real.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _put_byte(at, value, real) -> None:
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b8 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [at.to(tl.int64), value.to(tl.int32), real.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_scales(
    scales,
    row_start,
    word_stride,
    group,
    scale,
    real,
    GROUPS: tl.constexpr,
    UE8M0: tl.constexpr,
    RAW: tl.constexpr,
) -> None:
    """Store ``scale`` [N] of groups ``group`` [N] where ``real``; row_start: of the row's scales.

    scale: float32, or the exponent as uint8. Four exponents share an int32 word, each a byte of
    its own; bytes of a last word past GROUPS are written zero.
    """
    if UE8M0:
        at = scales.to(tl.pointer_type(tl.uint8)) + (
            (row_start + (group // 4) * word_stride) * 4 + group % 4
        )
        scale = tl.where(group < GROUPS, scale, 0)
        if RAW:
            _put_byte(at, scale, real)
        else:
            tl.store(at, scale, mask=real)
    else:
        at = scales + row_start + group * word_stride
        if RAW:
            _put_word(at, scale, real)
        else:
            tl.store(at, scale, mask=real)
