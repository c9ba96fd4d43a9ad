"""bfloat16 rows -> e4m3 rows and scales, written at once in the layout the next GEMM reads."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epdecode.batch import Fp8Rows
from epdecode.errors import ConfigError, nearest
from epdecode.kernels.checks import check
from epdecode.kernels.fp8 import (
    MN_ALIGNMENT,
    ScaleFormat,
    mn_major_scales,
    num_groups,
    quantize_ref,
    scale_dtype,
    scale_words,
)
from epdecode.kernels.launch import early_launch, launch_options
from epdecode.kernels.quant_math import quantize_groups
from epdecode.kernels.scale_store import store_scales

Layout = Literal["row", "column"]
LAYOUTS: tuple[Layout, ...] = ("row", "column")
"""row: scales [T, words] contiguous. column: rows contiguous, padded to 16 bytes (DeepGEMM)."""


@triton.jit
def _group_quant_kernel(
    x,
    data,
    scales,
    num_rows,
    lanes,
    row_stride,
    scale_row_stride,
    scale_word_stride,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    UE8M0: tl.constexpr,
    RAW: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = (GROUPS + 3) // 4 * 4 if UE8M0 else GROUPS
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    if PDL:
        gdc_wait()
    tile = tl.program_id(0)
    # Rows run fastest in a tile: neighbouring lanes write neighbouring scales of a column.
    index = tl.arange(0, ROWS * CHUNK)
    row = (tile // CHUNKS).to(tl.int64) * ROWS + index % ROWS
    group = (tile % CHUNKS) * CHUNK + index // ROWS
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    real = ((row < num_rows) & (group < GROUPS))[:, None]
    values = tl.load(x + (row * row_stride)[:, None] + column, mask=real, other=0.0)
    if PDL:
        gdc_launch_dependents()
    value, scale = quantize_groups(values.to(tl.float32), UE8M0)
    tl.store(data + (row * SIZE)[:, None] + column, value, mask=real)
    # A lane past the last row gets the scale of a zero row: no reader meets stale memory.
    live = (row < lanes) & (group < WIDTH)
    store_scales(
        scales,
        row * scale_row_stride,
        scale_word_stride,
        group,
        scale,
        live,
        GROUPS,
        UE8M0,
        RAW,
    )


def group_quant(
    x: torch.Tensor,
    scale_format: ScaleFormat = "fp32",
    layout: Layout = "column",
    out: Fp8Rows | None = None,
) -> Fp8Rows:
    """x bfloat16 [T, H], any row stride -> e4m3 [T, H], scales [T, H/128] or packed [T, H/512].

    ``out``: buffers to write; made when absent. In the column layout the lanes up to a multiple
    of four rows are written too. Raises ConfigError for shapes, types or strides.
    """
    out = empty_quantized(x, scale_format, layout) if out is None else out
    groups = _check(x, out, scale_format, layout)
    num_rows = x.shape[0]
    if num_rows == 0:
        return out
    lanes = -(-num_rows // MN_ALIGNMENT) * MN_ALIGNMENT if layout == "column" else num_rows
    # Sixteen groups a program: 2,048 values, 16 a lane. A float32 column wants four rows at once,
    # whose scales are neighbours in memory; packed exponents want four groups of one row.
    rows, chunk = (4, 4) if layout == "column" and scale_format == "fp32" else (1, 16)
    words = scale_words(groups, scale_format)
    width = groups if scale_format == "fp32" else words * 4
    grid = (-(-lanes // rows) * -(-width // chunk),)
    _group_quant_kernel[grid](
        x,
        out.data,
        out.scales,
        num_rows,
        lanes,
        x.stride(0),
        out.scales.stride(0),
        out.scales.stride(1),
        SIZE=x.shape[1],
        GROUPS=groups,
        ROWS=rows,
        CHUNK=chunk,
        UE8M0=scale_format == "ue8m0",
        RAW=x.is_cuda,
        PDL=early_launch(x.device),
        num_warps=4,
        **launch_options(x.device),
    )
    return out


def empty_quantized(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", layout: Layout = "column"
) -> Fp8Rows:
    """Buffers for ``group_quant(x, scale_format, layout)``; the data uninitialised."""
    _check_layout(layout)
    num_rows, size = x.shape
    groups = num_groups(size, "hidden size")
    data = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    if layout == "column":
        return Fp8Rows(data, mn_major_scales(1, num_rows, groups, scale_format, x.device)[0])
    shape = (num_rows, scale_words(groups, scale_format))
    return Fp8Rows(data, torch.empty(shape, dtype=scale_dtype(scale_format), device=x.device))


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(
            f"group_quant: layout is {layout!r}; accepted: {', '.join(LAYOUTS)}"
            f"{nearest(layout, LAYOUTS)}"
        )


def _check(x: torch.Tensor, out: Fp8Rows, scale_format: ScaleFormat, layout: Layout) -> int:
    """Groups per row, after every refusal."""
    op = "group_quant"
    _check_layout(layout)
    check(x.dim() == 2, op, "x's rank", x.dim(), "2: [T, H]")
    check(x.dtype == torch.bfloat16, op, "x's dtype", x.dtype, "bfloat16")
    check(x.stride(1) == 1, op, "x's stride", x.stride(), "values of a row contiguous")
    groups = num_groups(x.shape[1], "hidden size")
    check(out.data.shape == x.shape, op, "out.data's shape", out.data.shape, str(x.shape))
    check(out.data.is_contiguous(), op, "out.data's stride", out.data.stride(), "contiguous")
    scales, dtype = out.scales, scale_dtype(scale_format)
    shape = (x.shape[0], scale_words(groups, scale_format))
    check(scales.dtype == dtype, op, "the scales' dtype", scales.dtype, f"{dtype} ({scale_format})")
    check(tuple(scales.shape) == shape, op, "the scales' shape", tuple(scales.shape), str(shape))
    stride = tuple(scales.stride())
    if layout == "row":
        check(scales.is_contiguous(), op, "the scales' stride", stride, "contiguous (layout 'row')")
    else:
        padded = stride[1] >= shape[0] and stride[1] % MN_ALIGNMENT == 0
        aligned = shape[0] == 0 or (stride[0] == 1 and padded)
        accepted = f"(1, rows padded to {MN_ALIGNMENT}) (layout 'column')"
        check(aligned, op, "the scales' stride", stride, accepted)
    return groups


def group_quant_ref(
    x: torch.Tensor,
    scale_format: ScaleFormat = "fp32",
    layout: Layout = "column",
    out: Fp8Rows | None = None,
) -> Fp8Rows:
    """``group_quant`` in plain torch, the padding lanes of the column layout included."""
    out = empty_quantized(x, scale_format, layout) if out is None else out
    _check(x, out, scale_format, layout)
    num_rows = x.shape[0]
    lanes = -(-num_rows // MN_ALIGNMENT) * MN_ALIGNMENT if layout == "column" else num_rows
    padded = torch.nn.functional.pad(x, (0, 0, 0, lanes - num_rows))
    rows = quantize_ref(padded, scale_format)
    out.data.copy_(rows.data[:num_rows])
    out.scales.as_strided(rows.scales.shape, out.scales.stride()).copy_(rows.scales)
    return out
