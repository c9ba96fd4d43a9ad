"""RMSNorm over the hidden size, optionally after adding into the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epdecode.kernels.checks import check
from epdecode.kernels.launch import early_launch, launch_options, power_of_two


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    out,
    residual,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * SIZE
    lane = tl.arange(0, BLOCK)
    real = lane < SIZE
    if PDL:
        gdc_wait()
    value = tl.load(x + start + lane, mask=real, other=0.0).to(tl.float32)
    gain = tl.load(weight + lane, mask=real, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + start + lane, mask=real, other=0.0).to(tl.float32)
        rounded = value.to(tl.bfloat16)
        tl.store(residual + start + lane, rounded, mask=real)
        value = rounded.to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    mean = tl.sum(value * value, 0) / SIZE
    tl.store(out + start + lane, (value * tl.rsqrt(mean + eps) * gain).to(tl.bfloat16), mask=real)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = x / sqrt(mean(x^2) + eps) * weight, computed in float32; all bfloat16 [T, H].

    weight: float [H]. With ``residual`` [T, H], x is first added into it (in place, rounded to
    bfloat16) and the sum is what is normalised. ``out`` may be x.
    """
    _check(x, weight, out, residual)
    if x.shape[0] == 0:
        return out
    size = x.shape[1]
    _rms_norm_kernel[(x.shape[0],)](
        x,
        weight,
        out,
        x if residual is None else residual,
        eps,
        SIZE=size,
        BLOCK=power_of_two(size),
        RESIDUAL=residual is not None,
        PDL=early_launch(x.device),
        num_warps=8 if size > 2048 else 4,
        **launch_options(x.device),
    )
    return out


def rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``rms_norm`` in plain torch."""
    _check(x, weight, out, residual)
    if residual is not None:
        residual.copy_(x.float() + residual.float())
    value = (x if residual is None else residual).float()
    mean = value.square().mean(-1, keepdim=True)
    out.copy_(value * torch.rsqrt(mean + eps) * weight.float())
    return out


def _check(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None
) -> None:
    op = "rms_norm"
    check(x.dim() == 2, op, "x's rank", x.dim(), "2: [T, H]")
    named = {"x": x, "out": out} if residual is None else {"x": x, "out": out, "residual": residual}
    for name, rows in named.items():
        check(rows.dtype == torch.bfloat16, op, f"{name}'s dtype", rows.dtype, "bfloat16")
        check(rows.shape == x.shape, op, f"{name}'s shape", tuple(rows.shape), str(tuple(x.shape)))
        check(rows.is_contiguous(), op, f"{name}'s stride", rows.stride(), "contiguous")
    size = (x.shape[1],)
    check(tuple(weight.shape) == size, op, "weight's shape", tuple(weight.shape), str(size))
    check(weight.is_contiguous(), op, "weight's stride", weight.stride(), "contiguous")
