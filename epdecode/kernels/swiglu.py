"""SiLU(gate) * up over valid rows, bfloat16 in and out: the experts' path without FP8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epdecode.kernels.checks import check, check_counts
from epdecode.kernels.launch import early_launch, launch_options, persistent_programs
from epdecode.kernels.quant_math import silu_mul, silu_mul_ref
from epdecode.kernels.valid_rows import LANES, expert_rows, find_row, valid_rows_ref

BLOCK = 1024
"""Values one step of a program takes: 8 a lane of 4 warps."""


@triton.jit
def _swiglu_kernel(
    gate_up,
    counts,
    out,
    num_experts,
    capacity,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    PIECES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    if PDL:
        gdc_wait()
    count, ends, total = expert_rows(counts, num_experts, capacity, CHUNKS)
    items = total * PIECES
    item = tl.program_id(0)
    while item < items:
        row, _ = find_row(item // PIECES, count, ends, capacity, 0, 0, ALIGNMENT, CHUNKS)
        column = (item % PIECES) * BLOCK + tl.arange(0, BLOCK)
        real = column < SIZE
        source = gate_up + row * (2 * SIZE) + column
        gate = tl.load(source, mask=real, other=0.0).to(tl.float32)
        up = tl.load(source + SIZE, mask=real, other=0.0).to(tl.float32)
        if PDL and item + tl.num_programs(0) >= items:
            gdc_launch_dependents()
        tl.store(out + row * SIZE + column, silu_mul(gate, up).to(tl.bfloat16), mask=real)
        item += tl.num_programs(0)


def swiglu(gate_up: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """gate_up bfloat16 [E, M, 2I], gate half first; counts int32 [E] -> out bfloat16 [E, M, I].

    Valid rows only. Raises ConfigError for shapes, types or strides.
    """
    check(gate_up.dim() == 3, "swiglu", "gate_up's rank", gate_up.dim(), "3: [E, M, 2I]")
    return _run(gate_up, counts, out, 0)


def swiglu_packed(
    gate_up: torch.Tensor, counts: torch.Tensor, alignment: int, out: torch.Tensor
) -> torch.Tensor:
    """The same over [R, 2I] sorted by expert, each block at a multiple of ``alignment`` rows."""
    check(gate_up.dim() == 2, "swiglu_packed", "gate_up's rank", gate_up.dim(), "2: [R, 2I]")
    check(alignment > 0, "swiglu_packed", "alignment", alignment, "1 or more rows")
    return _run(gate_up, counts, out, alignment)


def _run(
    gate_up: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, alignment: int
) -> torch.Tensor:
    size = _check(gate_up, counts, out)
    items = gate_up.shape[:-1].numel() * -(-size // BLOCK)
    if items == 0 or counts.numel() == 0:
        return out
    device = gate_up.device
    _swiglu_kernel[(persistent_programs(device, 8, items),)](
        gate_up,
        counts,
        out,
        counts.numel(),
        gate_up.shape[-2],
        SIZE=size,
        BLOCK=BLOCK,
        CHUNKS=-(-counts.numel() // LANES),
        ALIGNMENT=alignment,
        PDL=early_launch(device),
        num_warps=4,
        **launch_options(device),
    )
    return out


def _check(gate_up: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> int:
    """Expert size I, after every refusal."""
    op = "swiglu"
    double = gate_up.shape[-1]
    check(double % 2 == 0, op, "gate_up's last dimension", double, "even: gate and up halves")
    shape = (*gate_up.shape[:-1], double // 2)
    for name, rows in {"gate_up": gate_up, "out": out}.items():
        check(rows.dtype == torch.bfloat16, op, f"{name}'s dtype", rows.dtype, "bfloat16")
        check(rows.is_contiguous(), op, f"{name}'s stride", rows.stride(), "contiguous")
    check(tuple(out.shape) == shape, op, "out's shape", tuple(out.shape), str(shape))
    check_counts(op, counts, gate_up)
    return double // 2


def swiglu_ref(gate_up: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``swiglu`` in plain torch; synchronises with the host."""
    return _run_ref(gate_up, counts, out, 0)


def swiglu_packed_ref(
    gate_up: torch.Tensor, counts: torch.Tensor, alignment: int, out: torch.Tensor
) -> torch.Tensor:
    """``swiglu_packed`` in plain torch."""
    return _run_ref(gate_up, counts, out, alignment)


def _run_ref(
    gate_up: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, alignment: int
) -> torch.Tensor:
    _check(gate_up, counts, out)
    row, _, _ = valid_rows_ref(counts, gate_up.shape[-2], alignment)
    gate, up = gate_up.flatten(0, -2)[row].float().chunk(2, dim=-1)
    out.flatten(0, -2)[row] = silu_mul_ref(gate, up).to(torch.bfloat16)
    return out
