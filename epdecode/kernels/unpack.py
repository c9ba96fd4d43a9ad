"""The experts' packed rows -> received rows, weighted and summed in float32.

Does not wait for the host: shapes are the worst case, the work follows the rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epdecode.kernels.checks import check
from epdecode.kernels.launch import early_launch, launch_options, persistent_programs
from epdecode.kernels.place_routes import Places

BLOCK = 1024
"""Values one step of a program takes."""


@triton.jit
def _unpack_kernel(
    rows,
    row_map,
    weights,
    out,
    num_received,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    items = tl.load(num_received) * CHUNKS
    item = tl.program_id(0)
    while item < items:
        row = (item // CHUNKS).to(tl.int64)
        column = (item % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for slot in tl.static_range(K):
            at = tl.load(row_map + row * K + slot).to(tl.int64)
            weight = tl.load(weights + row * K + slot, mask=at >= 0, other=0.0)
            value = tl.load(rows + at * SIZE + column, mask=(at >= 0) & (column < SIZE), other=0.0)
            total += value.to(tl.float32) * weight
        tl.store(out + row * SIZE + column, total.to(tl.bfloat16), mask=column < SIZE)
        item += tl.num_programs(0)


def unpack_weighted(
    rows: torch.Tensor, places: Places, topk_weights: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """rows bfloat16 [R, H] of the experts -> out bfloat16 [R0, H], weighted sums in float32.

    topk_weights: float32 [R0, K]; the weight of a slot without an expert is never read. Rows of
    ``out`` after the last received one with an expert are not written.
    """
    _check_unpack(rows, places, topk_weights, out)
    received, top_k = places.row_map.shape
    size = rows.shape[1]
    items = received * -(-size // BLOCK)
    if items:
        _unpack_kernel[(persistent_programs(rows.device, 8, items),)](
            rows,
            places.row_map,
            topk_weights,
            out,
            places.num_received,
            K=top_k,
            SIZE=size,
            BLOCK=BLOCK,
            PDL=early_launch(rows.device),
            num_warps=4,
            **launch_options(rows.device),
        )
    return out


def unpack_weighted_ref(
    rows: torch.Tensor, places: Places, topk_weights: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """``unpack_weighted`` in plain torch; synchronises with the host."""
    _check_unpack(rows, places, topk_weights, out)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for slot in range(places.row_map.shape[1]):
        at = places.row_map[:, slot].long()
        row = (at >= 0).nonzero().squeeze(1)
        total[row] += rows[at[row]].float() * topk_weights[row, slot, None]
    received = int(places.num_received)
    out[:received] = total[:received].to(torch.bfloat16)
    return out


def _check_unpack(
    rows: torch.Tensor, places: Places, topk_weights: torch.Tensor, out: torch.Tensor
) -> None:
    op = "unpack_weighted"
    received = places.row_map.shape[0]
    wanted = {
        "rows": (rows, torch.bfloat16, (places.labels.numel(), out.shape[1])),
        "topk_weights": (topk_weights, torch.float32, tuple(places.row_map.shape)),
        "out": (out, torch.bfloat16, (received, out.shape[1])),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        check(tensor.dtype == dtype, op, f"{name}'s dtype", tensor.dtype, str(dtype))
        check(tuple(tensor.shape) == shape, op, f"{name}'s shape", tuple(tensor.shape), str(shape))
        check(tensor.is_contiguous(), op, f"{name}'s stride", tensor.stride(), "contiguous")
