"""Received rows -> rows sorted by local expert for the contiguous grouped GEMM, and back.

Neither waits for the host: shapes are the worst case, the work follows the rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epdecode.batch import Fp8Rows, Rows
from epdecode.kernels.checks import check
from epdecode.kernels.launch import early_launch, launch_options, persistent_programs, power_of_two
from epdecode.kernels.place_routes import Places

BLOCK = 1024
"""Values (32-bit words in pack, bfloat16 in unpack_weighted) one step of a program takes."""
ROWS = 32
"""Packed rows whose scales one step of a program moves: one column of them fills a cache line."""


@triton.jit
def _copy_rows(
    item, source, target, row_map,
    K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One chunk of a received row to all its places."""
    row = (item // CHUNKS).to(tl.int64)
    column = (item % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + row * SIZE + column, mask=column < SIZE)
    # All places before the first store: the compiler cannot know that stores spare the map.
    places = ()
    for slot in tl.static_range(K):
        place = tl.load(row_map + row * K + slot).to(tl.int64)
        places = places + (place,)  # type: ignore[assignment]
    for slot in tl.static_range(K):
        to = places[slot]  # type: ignore[var-annotated]
        tl.store(target + to * SIZE + column, value, mask=(to >= 0) & (column < SIZE))


@triton.jit
def _copy_scales(
    tile, scales, to_scales, sources, labels, num_rows,
    row_stride, word_stride, to_row_stride, to_word_stride,
    ROWS: tl.constexpr, WORDS: tl.constexpr, WORD_LANES: tl.constexpr,
):  # fmt: skip
    """The scales of ROWS packed rows: read by row, written by column, as they lie."""
    place = tile * ROWS + tl.arange(0, ROWS)
    real = tl.load(labels + place, mask=place < num_rows, other=-1) >= 0
    row = tl.load(sources + place, mask=real, other=0).to(tl.int64)[:, None]
    word = tl.arange(0, WORD_LANES)[None, :]
    here = real[:, None] & (word < WORDS)
    value = tl.load(scales + row * row_stride + word * word_stride, mask=here)
    at = place.to(tl.int64)[:, None] * to_row_stride + word * to_word_stride
    tl.store(to_scales + at, value, mask=here)


@triton.jit
def _copy_kernel(
    source,
    scales,
    target,
    to_scales,
    row_map,
    sources,
    labels,
    num_received,
    num_rows,
    row_stride,
    word_stride,
    to_row_stride,
    to_word_stride,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    copies = tl.load(num_received) * CHUNKS
    items = copies
    if WORDS:
        items += (num_rows + ROWS - 1) // ROWS
    item = tl.program_id(0)
    while item < items:
        if item < copies:
            _copy_rows(item, source, target, row_map, K, SIZE, BLOCK, CHUNKS)
        else:
            _copy_scales(
                item - copies, scales, to_scales, sources, labels, num_rows,
                row_stride, word_stride, to_row_stride, to_word_stride, ROWS, WORDS, WORD_LANES,
            )  # fmt: skip
        item += tl.num_programs(0)


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


def pack(rows: Rows, places: Places, out: Rows) -> Rows:
    """rows [R0, H] -> ``out`` [R, H], each row copied to where ``places`` (place_routes) has it.

    Both bfloat16, or both Fp8Rows with scales [.., words] of any strides: received ones row-major,
    the GEMM's MN-major. Rows in gaps are not written; rows that go nowhere are not read.
    """
    _check_pack(rows, places, out)
    if places.row_map.numel():
        _copy(rows, places, out)
    return out


def _copy(rows: Rows, places: Places, out: Rows) -> None:
    """Copy each received row to where its routes go, as 32-bit words whatever the type."""
    received, top_k = places.row_map.shape
    source, target = _words(rows), _words(out)
    size = source.shape[1]
    scales = rows.scales if isinstance(rows, Fp8Rows) else source
    to_scales = out.scales if isinstance(out, Fp8Rows) else target
    words = scales.shape[1] if isinstance(rows, Fp8Rows) else 0
    num_rows = places.labels.numel()
    items = received * -(-size // BLOCK) + (-(-num_rows // ROWS) if words else 0)
    _copy_kernel[(persistent_programs(source.device, 8, items),)](
        source,
        scales,
        target,
        to_scales,
        places.row_map,
        places.sources,
        places.labels,
        places.num_received,
        num_rows,
        scales.stride(0),
        scales.stride(1),
        to_scales.stride(0),
        to_scales.stride(1),
        K=top_k,
        SIZE=size,
        BLOCK=BLOCK,
        ROWS=ROWS,
        WORDS=words,
        WORD_LANES=power_of_two(words),
        PDL=early_launch(source.device),
        num_warps=4,
        **launch_options(source.device),
    )


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


def pack_ref(rows: Rows, places: Places, out: Rows) -> Rows:
    """``pack`` in plain torch; synchronises with the host."""
    _check_pack(rows, places, out)
    row, slot = (places.row_map >= 0).nonzero(as_tuple=True)
    to = places.row_map[row, slot].long()
    _words(out)[to] = _words(rows)[row]
    if isinstance(rows, Fp8Rows) and isinstance(out, Fp8Rows):
        out.scales[to] = rows.scales[row]
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


def _check_pack(rows: Rows, places: Places, out: Rows) -> None:
    op = "pack"
    check(type(rows) is type(out), op, "out's type", type(out).__name__, type(rows).__name__)
    source, target = _data(rows), _data(out)
    check(source.is_contiguous(), op, "rows' stride", source.stride(), "contiguous")
    check(target.is_contiguous(), op, "out's stride", target.stride(), "contiguous")
    check(source.dtype == target.dtype, op, "out's dtype", target.dtype, str(source.dtype))
    shape = (places.row_map.shape[0], target.shape[1])
    check(tuple(source.shape) == shape, op, "rows' shape", tuple(source.shape), str(shape))
    num_rows = places.labels.numel()
    check(target.shape[0] == num_rows, op, "out's rows", target.shape[0], str(num_rows))
    size = source.shape[1] * source.element_size()
    check(size % 4 == 0, op, "bytes of a row", size, "multiples of 4")
    if isinstance(rows, Fp8Rows) and isinstance(out, Fp8Rows):
        words = (num_rows, rows.scales.shape[1])
        got = tuple(out.scales.shape)
        check(got == words, op, "out.scales' shape", got, str(words))
        dtype = rows.scales.dtype
        check(out.scales.dtype == dtype, op, "out.scales' dtype", out.scales.dtype, str(dtype))


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


def _data(rows: Rows) -> torch.Tensor:
    return rows.data if isinstance(rows, Fp8Rows) else rows


def _words(rows: Rows) -> torch.Tensor:
    return _data(rows).view(torch.int32)
