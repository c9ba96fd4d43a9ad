"""SiLU(gate) * up and FP8 quantisation in one pass over valid rows, scales in the GEMM's layout.

The grid walks (valid row, chunk of groups) pairs, found from the counts on the device: its speed
follows the rows there are, whatever the capacity and however skewed the load.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epdecode.batch import Fp8Rows
from epdecode.kernels.checks import check, check_counts, check_scales
from epdecode.kernels.fp8 import (
    ScaleFormat,
    mn_major_scales,
    num_groups,
    quantize_ref,
    scale_words,
)
from epdecode.kernels.launch import early_launch, launch_options, persistent_programs
from epdecode.kernels.quant_math import quantize_groups, silu_mul, silu_mul_ref
from epdecode.kernels.scale_store import store_scales
from epdecode.kernels.valid_rows import LANES, expert_rows, find_groups, valid_rows_ref

TILE = 16
"""Groups a program takes at a time: 2,048 values."""
FEW_EXPERTS = (8, 6)
"""Warps of a program, programs per multiprocessor, up to 64 experts (swept on an H200)."""
MANY_EXPERTS = (4, 8)
"""The same beyond: finding a row is then dearer, and every warp does it."""


@triton.jit
def _swiglu_quant_kernel(
    gate_up,
    counts,
    data,
    scales,
    num_experts,
    capacity,
    scale_expert_stride,
    scale_row_stride,
    scale_word_stride,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UE8M0: tl.constexpr,
    RAW: tl.constexpr,
    PDL: tl.constexpr,
):
    # A row of packed exponents is whole words: the groups past the last are pieces of work too.
    WIDTH: tl.constexpr = (GROUPS + 3) // 4 * 4 if UE8M0 else GROUPS
    if PDL:
        gdc_wait()
    count, ends, total = expert_rows(counts, num_experts, capacity, CHUNKS)
    groups = total * WIDTH
    item = tl.program_id(0)
    while item * TILE < groups:
        row, scale_row, group = find_groups(
            item,
            count,
            ends,
            capacity,
            scale_expert_stride,
            scale_row_stride,
            ALIGNMENT,
            CHUNKS,
            WIDTH,
            TILE,
        )
        live = item * TILE + tl.arange(0, TILE) < groups
        real = (live & (group < GROUPS))[:, None]
        lane = tl.arange(0, 128)[None, :]
        source = gate_up + (row * (2 * SIZE) + group * 128)[:, None] + lane
        gate = tl.load(source, mask=real, other=0.0).to(tl.float32)
        up = tl.load(source + SIZE, mask=real, other=0.0).to(tl.float32)
        if PDL and (item + tl.num_programs(0)) * TILE >= groups:
            gdc_launch_dependents()
        value, scale = quantize_groups(silu_mul(gate, up), UE8M0)
        tl.store(data + (row * SIZE + group * 128)[:, None] + lane, value, mask=real)
        store_scales(scales, scale_row, scale_word_stride, group, scale, live, GROUPS, UE8M0, RAW)
        item += tl.num_programs(0)


def swiglu_quant(
    gate_up: torch.Tensor,
    counts: torch.Tensor,
    out: Fp8Rows,
    scale_format: ScaleFormat = "fp32",
) -> Fp8Rows:
    """gate_up bfloat16 [E, M, 2I], gate half first; counts int32 [E] -> ``out``, valid rows only.

    out: e4m3 [E, M, I] with scales of any strides, float32 [E, M, I/128] or packed UE8M0 int32
    [E, M, ceil(I/512)]; ``empty_out`` makes them MN-major, as the GEMM reads them. Raises
    ConfigError for shapes, types or strides.
    """
    check(gate_up.dim() == 3, "swiglu_quant", "gate_up's rank", gate_up.dim(), "3: [E, M, 2I]")
    return _run(gate_up, counts, out, scale_format, 0)


def swiglu_quant_packed(
    gate_up: torch.Tensor,
    counts: torch.Tensor,
    alignment: int,
    out: Fp8Rows,
    scale_format: ScaleFormat = "fp32",
) -> Fp8Rows:
    """The same over gate_up [R, 2I] sorted by expert, blocks at multiples of ``alignment`` rows.

    out: e4m3 [R, I], scales [R, I/128] or packed [R, ceil(I/512)]. Gaps are not written.
    """
    check(gate_up.dim() == 2, "swiglu_quant_packed", "gate_up's rank", gate_up.dim(), "2: [R, 2I]")
    check(alignment > 0, "swiglu_quant_packed", "alignment", alignment, "1 or more rows")
    return _run(gate_up, counts, out, scale_format, alignment)


def _run(
    gate_up: torch.Tensor,
    counts: torch.Tensor,
    out: Fp8Rows,
    scale_format: ScaleFormat,
    alignment: int,
) -> Fp8Rows:
    capacity, double = gate_up.shape[-2:]
    groups = _check(gate_up, counts, out, scale_format)
    items = -(-gate_up.shape[:-1].numel() * groups // TILE)
    if items == 0 or counts.numel() == 0:
        return out
    scales = out.scales
    device = gate_up.device
    warps, per_processor = FEW_EXPERTS if counts.numel() <= 64 else MANY_EXPERTS
    _swiglu_quant_kernel[(persistent_programs(device, per_processor, items),)](
        gate_up,
        counts,
        out.data,
        scales,
        counts.numel(),
        capacity,
        0 if alignment else scales.stride(0),
        scales.stride(-2),
        scales.stride(-1),
        SIZE=double // 2,
        GROUPS=groups,
        TILE=TILE,
        CHUNKS=-(-counts.numel() // LANES),
        ALIGNMENT=alignment,
        UE8M0=scale_format == "ue8m0",
        RAW=device.type == "cuda",
        PDL=early_launch(device),
        num_warps=warps,
        **launch_options(device),
    )
    return out


def _check(
    gate_up: torch.Tensor, counts: torch.Tensor, out: Fp8Rows, scale_format: ScaleFormat
) -> int:
    """Groups per row, after every refusal."""
    op = "swiglu_quant"
    double = gate_up.shape[-1]
    check(double % 2 == 0, op, "gate_up's last dimension", double, "even: gate and up halves")
    groups = num_groups(double // 2, "expert size (half of gate_up's last dimension)")
    check(gate_up.dtype == torch.bfloat16, op, "gate_up's dtype", gate_up.dtype, "bfloat16")
    check(gate_up.is_contiguous(), op, "gate_up's stride", gate_up.stride(), "contiguous")
    rows = (*gate_up.shape[:-1], double // 2)
    check(tuple(out.data.shape) == rows, op, "out.data's shape", tuple(out.data.shape), str(rows))
    check(out.data.is_contiguous(), op, "out.data's stride", out.data.stride(), "contiguous")
    check_counts(op, counts, gate_up)
    check_scales(op, out.scales, (*rows[:-1], scale_words(groups, scale_format)), scale_format)
    return groups


def empty_out(
    num_experts: int,
    capacity: int,
    expert_size: int,
    scale_format: ScaleFormat = "fp32",
    device: torch.device | str = "cuda",
) -> Fp8Rows:
    """Output buffers for ``swiglu_quant``: e4m3 [E, M, I] uninitialised, MN-major scales of one."""
    groups = num_groups(expert_size, "expert size")
    shape = (num_experts, capacity, expert_size)
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(data, mn_major_scales(num_experts, capacity, groups, scale_format, device))


def empty_out_packed(
    num_rows: int,
    expert_size: int,
    scale_format: ScaleFormat = "fp32",
    device: torch.device | str = "cuda",
) -> Fp8Rows:
    """Output buffers for ``swiglu_quant_packed``: e4m3 [R, I] and MN-major scales of one."""
    out = empty_out(1, num_rows, expert_size, scale_format, device)
    return Fp8Rows(out.data[0], out.scales[0])


def swiglu_quant_ref(
    gate_up: torch.Tensor,
    counts: torch.Tensor,
    out: Fp8Rows,
    scale_format: ScaleFormat = "fp32",
) -> Fp8Rows:
    """``swiglu_quant`` in plain torch, row for row; synchronises with the host."""
    return _run_ref(gate_up, counts, out, scale_format, 0)


def swiglu_quant_packed_ref(
    gate_up: torch.Tensor,
    counts: torch.Tensor,
    alignment: int,
    out: Fp8Rows,
    scale_format: ScaleFormat = "fp32",
) -> Fp8Rows:
    """``swiglu_quant_packed`` in plain torch."""
    return _run_ref(gate_up, counts, out, scale_format, alignment)


def _run_ref(
    gate_up: torch.Tensor,
    counts: torch.Tensor,
    out: Fp8Rows,
    scale_format: ScaleFormat,
    alignment: int,
) -> Fp8Rows:
    _check(gate_up, counts, out, scale_format)
    row, expert, inner = valid_rows_ref(counts, gate_up.shape[-2], alignment)
    gate, up = gate_up.flatten(0, -2)[row].float().chunk(2, dim=-1)
    rows = quantize_ref(silu_mul_ref(gate, up), scale_format)
    out.data.flatten(0, -2).view(torch.uint8)[row] = rows.data.view(torch.uint8)
    out.scales[(row,) if alignment else (expert, inner)] = rows.scales
    return out
