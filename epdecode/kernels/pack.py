"""Received rows -> rows sorted by local expert for the contiguous grouped GEMM.

Does not wait for the host: shapes are the worst case, the work follows the rows there are. The way
back is unpack_weighted.
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
from epdecode.kernels.unpack import unpack_weighted as unpack_weighted
from epdecode.kernels.unpack import unpack_weighted_ref as unpack_weighted_ref

BLOCK = 1024
"""32-bit words one step of a program takes."""
SCALE_ROWS = 32
"""Packed rows whose scales one step moves: 128 bytes of a column."""


@triton.jit
def _copy_row(
    source,
    target,
    row_map,
    item,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One piece of a received row to all its places."""
    CHUNKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
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
    source,
    target,
    source_rows,
    first,
    num_rows,
    row_stride,
    word_stride,
    to_row_stride,
    to_word_stride,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """All scales of ROWS packed rows: their rows are neighbours in the GEMM's layout."""
    row = first + tl.arange(0, ROWS)
    come = tl.load(source_rows + row, mask=row < num_rows, other=-1).to(tl.int64)
    word = tl.arange(0, WORD_LANES)
    real = (come >= 0)[:, None] & (word < WORDS)[None, :]
    at = (come * row_stride)[:, None] + (word * word_stride)[None, :]
    scale = tl.load(source + at, mask=real)
    to = (row.to(tl.int64) * to_row_stride)[:, None] + (word * to_word_stride)[None, :]
    tl.store(target + to, scale, mask=real)


@triton.jit
def _pack_kernel(
    source,
    source_scales,
    target,
    target_scales,
    row_map,
    source_rows,
    num_received,
    num_rows,
    scale_row_stride,
    scale_word_stride,
    to_row_stride,
    to_word_stride,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pieces = tl.load(num_received) * ((SIZE + BLOCK - 1) // BLOCK)
    item = tl.program_id(0)
    while item < pieces:
        _copy_row(source, target, row_map, item, K, SIZE, BLOCK)
        item += tl.num_programs(0)
    if WORDS:
        first = (item - pieces) * SCALE_ROWS
        while first < num_rows:
            _copy_scales(
                source_scales,
                target_scales,
                source_rows,
                first,
                num_rows,
                scale_row_stride,
                scale_word_stride,
                to_row_stride,
                to_word_stride,
                WORDS,
                WORD_LANES,
                SCALE_ROWS,
            )
            first += tl.num_programs(0) * SCALE_ROWS


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
    items = received * -(-size // BLOCK) + (-(-places.labels.numel() // SCALE_ROWS) if words else 0)
    _pack_kernel[(persistent_programs(source.device, 8, items),)](
        source,
        scales,
        target,
        to_scales,
        places.row_map,
        places.source_rows,
        places.num_received,
        places.labels.numel(),
        scales.stride(0),
        scales.stride(1),
        to_scales.stride(0),
        to_scales.stride(1),
        K=top_k,
        SIZE=size,
        BLOCK=BLOCK,
        WORDS=words,
        WORD_LANES=power_of_two(words),
        SCALE_ROWS=SCALE_ROWS,
        PDL=early_launch(source.device),
        num_warps=4,
        **launch_options(source.device),
    )


def pack_ref(rows: Rows, places: Places, out: Rows) -> Rows:
    """``pack`` in plain torch; synchronises with the host."""
    _check_pack(rows, places, out)
    row, slot = (places.row_map >= 0).nonzero(as_tuple=True)
    to = places.row_map[row, slot].long()
    _words(out)[to] = _words(rows)[row]
    if isinstance(rows, Fp8Rows) and isinstance(out, Fp8Rows):
        out.scales[to] = rows.scales[row]
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


def _data(rows: Rows) -> torch.Tensor:
    return rows.data if isinstance(rows, Fp8Rows) else rows


def _words(rows: Rows) -> torch.Tensor:
    return _data(rows).view(torch.int32)
