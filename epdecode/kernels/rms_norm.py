"""RMSNorm over the hidden size, alone or at the end of a layer: all its sums and the next norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epdecode.batch import LayerEnd
from epdecode.kernels.checks import check
from epdecode.kernels.launch import early_launch, launch_options, power_of_two


@triton.jit
def _normed(value, weight, lane, real, eps, SIZE: tl.constexpr):
    gain = tl.load(weight + lane, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, 0) / SIZE
    return (value * tl.rsqrt(mean + eps) * gain).to(tl.bfloat16)


@triton.jit
def _rms_norm_kernel(
    x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * SIZE
    lane = tl.arange(0, BLOCK)
    real = lane < SIZE
    if PDL:
        gdc_wait()
    value = tl.load(x + start + lane, mask=real, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    tl.store(out + start + lane, _normed(value, weight, lane, real, eps, SIZE), mask=real)


@triton.jit
def _add_rms_norm_kernel(
    hidden, routed, shared, weight, out, total, normed, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * SIZE
    lane = tl.arange(0, BLOCK)
    real = lane < SIZE
    if PDL:
        gdc_wait()
    value = tl.load(routed + start + lane, mask=real, other=0.0)
    before = tl.load(hidden + start + lane, mask=real, other=0.0)
    if SHARED:
        more = tl.load(shared + start + lane, mask=real, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(tl.bfloat16)
        tl.store(out + start + lane, value, mask=real)
    value = (before.to(tl.float32) + value.to(tl.float32)).to(tl.bfloat16)
    if PDL:
        gdc_launch_dependents()
    tl.store(total + start + lane, value, mask=real)
    if NORM:
        made = _normed(value.to(tl.float32), weight, lane, real, eps, SIZE)
        tl.store(normed + start + lane, made, mask=real)


def _warps(size: int) -> int:
    return 8 if size > 2048 else 4


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """out = x / sqrt(mean(x^2) + eps) * weight, computed in float32; all bfloat16 [T, H].

    weight: float [H]. ``out`` may be x.
    """
    _check("rms_norm", weight, x=x, out=out)
    if x.shape[0] == 0:
        return out
    size = x.shape[1]
    _rms_norm_kernel[(x.shape[0],)](
        x, weight, out, eps, SIZE=size, BLOCK=power_of_two(size), PDL=early_launch(x.device),
        num_warps=_warps(size), **launch_options(x.device),
    )  # fmt: skip
    return out


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> torch.Tensor:
    """``rms_norm`` in plain torch."""
    _check("rms_norm", weight, x=x, out=out)
    value = x.float()
    mean = value.square().mean(-1, keepdim=True)
    out.copy_(value * torch.rsqrt(mean + eps) * weight.float())
    return out


def add_rms_norm(
    hidden: torch.Tensor,
    routed: torch.Tensor,
    shared: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
) -> LayerEnd:
    """out = routed + shared, hidden + out, and its RMSNorm by ``weight``, in one pass.

    All bfloat16 [T, H], each sum rounded to bfloat16; weight: float [H], None for no norm. Without
    ``shared``, out is ``routed``.
    """
    rows = {"hidden": hidden, "routed": routed}
    _check("add_rms_norm", weight, **rows, **({} if shared is None else {"shared": shared}))
    total = torch.empty_like(hidden)
    out = routed if shared is None else torch.empty_like(routed)
    normed = total if weight is None else torch.empty_like(hidden)
    tokens, size = hidden.shape
    if tokens == 0:
        return LayerEnd(out, total, normed)
    _add_rms_norm_kernel[(tokens,)](
        hidden, routed, routed if shared is None else shared, hidden if weight is None else weight,
        out, total, normed, eps, SIZE=size, BLOCK=power_of_two(size), SHARED=shared is not None,
        NORM=weight is not None, PDL=early_launch(hidden.device), num_warps=_warps(size),
        **launch_options(hidden.device),
    )  # fmt: skip
    return LayerEnd(out, total, normed)


def add_rms_norm_ref(
    hidden: torch.Tensor,
    routed: torch.Tensor,
    shared: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
) -> LayerEnd:
    """``add_rms_norm`` in plain torch."""
    rows = {"hidden": hidden, "routed": routed}
    _check("add_rms_norm", weight, **rows, **({} if shared is None else {"shared": shared}))
    out = routed if shared is None else routed + shared
    total = hidden + out
    if weight is None:
        return LayerEnd(out, total, total)
    return LayerEnd(out, total, rms_norm_ref(total, weight, eps, torch.empty_like(total)))


def _check(op: str, weight: torch.Tensor | None, **named: torch.Tensor) -> None:
    shape = next(iter(named.values())).shape
    check(len(shape) == 2, op, "rank", len(shape), "2: [T, H]")
    for name, rows in named.items():
        check(rows.dtype == torch.bfloat16, op, f"{name}'s dtype", rows.dtype, "bfloat16")
        check(rows.shape == shape, op, f"{name}'s shape", tuple(rows.shape), str(tuple(shape)))
        check(rows.is_contiguous(), op, f"{name}'s stride", rows.stride(), "contiguous")
    if weight is not None:
        size = tuple(shape[1:])
        check(tuple(weight.shape) == size, op, "weight's shape", tuple(weight.shape), str(size))
        check(weight.is_contiguous(), op, "weight's stride", weight.stride(), "contiguous")
