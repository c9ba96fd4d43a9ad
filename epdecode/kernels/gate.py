"""Gate logits in parts: K is split so that a decode batch's few tiles still fill the GPU.

Nobody adds the parts here: the router reads all of them, in order, so the sum is the same every
time and costs no launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epdecode.kernels.checks import check
from epdecode.kernels.dot import dot_bfloat16
from epdecode.kernels.launch import early_launch, launch_options, persistent_programs, power_of_two

EXPERTS = 64
"""Experts of a tile."""
STEP = 128
"""Columns of one product; a part is a whole number of them."""
EARLY = 4
"""Products whose weights are loaded ahead of the rows: as many as 8 warps have registers for."""


@triton.jit
def _gate_kernel(
    x, gate, parts, tokens, experts, size,
    STEPS: tl.constexpr, EARLY: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    STEP: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    part = tl.program_id(2)
    column = (part * STEPS * STEP + tl.arange(0, STEP))[None, :]
    here, there = (token < tokens)[:, None], (expert < experts)[:, None]
    rows = x + token.to(tl.int64)[:, None] * size + column
    weights = gate + expert.to(tl.int64)[:, None] * size + column
    # Weights wait for no kernel: their way here passes while the rows are still being normed.
    ready = ()
    for step in tl.static_range(EARLY):
        mask = there & (column + step * STEP < size)
        ready = ready + (tl.load(weights + step * STEP, mask=mask, other=0.0),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for step in tl.static_range(EARLY):
        mask = here & (column + step * STEP < size)
        a = tl.load(rows + step * STEP, mask=mask, other=0.0)
        total = dot_bfloat16(a, tl.trans(ready[step]), total, WIDEN)
    for step in tl.range(EARLY, STEPS):
        inside = column + step * STEP < size
        a = tl.load(rows + step * STEP, mask=here & inside, other=0.0)
        b = tl.load(weights + step * STEP, mask=there & inside, other=0.0)
        total = dot_bfloat16(a, tl.trans(b), total, WIDEN)
    to = parts + (part * tokens + token).to(tl.int64)[:, None] * experts + expert[None, :]
    tl.store(to, total, mask=here & (expert < experts)[None, :])


def gate_logits(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x bfloat16 [T, H], gate bfloat16 [experts, H] -> float32 [parts, T, experts].

    The logits are the sum over parts; products are exact, sums float32.
    """
    _check(x, gate)
    (tokens, size), experts = x.shape, gate.shape[0]
    block = max(16, min(64, power_of_two(tokens)))
    tiles, steps = (-(-tokens // block), -(-experts // EXPERTS)), -(-size // STEP)
    of_part = _steps_of_part(steps, tiles[0] * tiles[1], x.device)
    num_parts = -(-steps // of_part)
    parts = torch.empty(num_parts, tokens, experts, dtype=torch.float32, device=x.device)
    if tokens:
        _gate_kernel[(*tiles, num_parts)](
            x, gate, parts, tokens, experts, size, STEPS=of_part, EARLY=min(EARLY, of_part),
            TOKENS=block, EXPERTS=EXPERTS, STEP=STEP, WIDEN=x.device.type != "cuda",
            PDL=early_launch(x.device), num_warps=8, **launch_options(x.device),
        )  # fmt: skip
    return parts


def _steps_of_part(steps: int, tiles: int, device: torch.device) -> int:
    """As few as give no more programs than the GPU has multiprocessors."""
    programs = persistent_programs(device, 1, steps * max(1, tiles))
    parts = max(1, min(steps, programs // max(1, tiles)))
    return -(-steps // parts)


def gate_logits_ref(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """float32 [T, experts] in plain torch: ``gate_logits`` in a single part."""
    _check(x, gate)
    return x.float() @ gate.float().T


def _check(x: torch.Tensor, gate: torch.Tensor) -> None:
    op = "gate_logits"
    for name, rows in (("x", x), ("gate", gate)):
        check(rows.dim() == 2, op, f"{name}'s rank", rows.dim(), "2")
        check(rows.dtype == torch.bfloat16, op, f"{name}'s dtype", rows.dtype, "bfloat16")
        check(rows.is_contiguous(), op, f"{name}'s stride", rows.stride(), "contiguous")
    check(gate.shape[1] == x.shape[1], op, "gate's hidden", gate.shape[1], str(x.shape[1]))
