"""Bench cases of the high-throughput path: received rows sorted by expert, and back."""

from __future__ import annotations

from functools import partial

import torch

from epdecode.batch import Fp8Rows
from epdecode.bench.cases import POISON, Built, Case, quantized_difference
from epdecode.bench.kernel_shapes import Shape
from epdecode.kernels.fp8 import GROUP, mn_major_scales, quantize_ref
from epdecode.kernels.pack import pack, pack_ref, unpack_weighted, unpack_weighted_ref
from epdecode.kernels.place_routes import Places, empty_places, most_packed_rows, place_routes

ALIGNMENT = 128
"""Rows to which the contiguous GEMM pads an expert's block."""


def _routes(shape: Shape, device: torch.device) -> tuple[torch.Tensor, Places]:
    """Every received row has ``K`` distinct local experts."""
    received, experts, top_k = int(shape["R"]), int(shape["E"]), int(shape["K"])
    ids = torch.rand(received, experts, device=device).topk(top_k, dim=1).indices.contiguous()
    rows = most_packed_rows(received, top_k, experts, ALIGNMENT)
    return ids, empty_places(received, top_k, experts, rows, device)


def pack_case(shape: Shape) -> Case:
    """R, E, K, H -> place the routes and copy FP8 rows with their scales."""
    received, top_k, hidden = int(shape["R"]), int(shape["K"]), int(shape["H"])
    row_bytes = hidden + 4 * hidden // GROUP
    num_bytes = received * (1 + top_k) * row_bytes + received * top_k * (8 + 4)

    def build(device: torch.device, sets: int) -> Built:
        ids, places = _routes(shape, device)
        sources = [quantize_ref(torch.randn(received, hidden, device=device)) for _ in range(sets)]
        outs = [_empty(places, hidden, device) for _ in sources]

        def run(rows: Fp8Rows, out: Fp8Rows) -> None:
            pack(rows, place_routes(ids, ALIGNMENT, places), out)

        def difference() -> str:
            place_routes(ids, ALIGNMENT, places)
            got, want = (_empty(places, hidden, device) for _ in range(2))
            pack(sources[0], places, got)
            pack_ref(sources[0], places, want)
            return quantized_difference(got, want, exact=True)

        calls = tuple(partial(run, x, out) for x, out in zip(sources, outs, strict=True))
        return Built(calls, partial(_plain_pack, sources[0], ids), None, difference)

    return Case("pack", shape, num_bytes, build)


def _empty(places: Places, hidden: int, device: torch.device) -> Fp8Rows:
    rows = places.labels.numel()
    data = torch.full((rows, hidden), POISON, dtype=torch.uint8, device=device)
    scales = mn_major_scales(1, rows, hidden // GROUP, device=device)[0]
    return Fp8Rows(data.view(torch.float8_e4m3fn), scales)


def _plain_pack(rows: Fp8Rows, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort, two gathers, transpose of the scales; without the padding of the blocks."""
    source = ids.flatten().argsort(stable=True) // ids.shape[1]
    return rows.data.view(torch.uint8)[source], rows.scales[source].T.contiguous()


def unpack_weighted_case(shape: Shape) -> Case:
    """R, E, K, H -> weighted sum of each received row's experts."""
    received, top_k, hidden = int(shape["R"]), int(shape["K"]), int(shape["H"])
    num_bytes = received * (top_k + 1) * 2 * hidden + received * top_k * 8

    def build(device: torch.device, sets: int) -> Built:
        ids, places = _routes(shape, device)
        place_routes(ids, ALIGNMENT, places)
        weights = torch.rand(received, top_k, device=device)
        rows = places.labels.numel()
        sources = [
            torch.randn(rows, hidden, device=device, dtype=torch.bfloat16) for _ in range(sets)
        ]
        outs = [torch.empty(received, hidden, device=device).bfloat16() for _ in sources]

        def difference() -> str:
            got, want = (torch.empty_like(outs[0]) for _ in range(2))
            unpack_weighted(sources[0], places, weights, got)
            unpack_weighted_ref(sources[0], places, weights, want)
            off = ~torch.isclose(got.float(), want.float(), rtol=2**-7, atol=2**-7)
            return f"{int(off.sum())} of {off.numel()} values are off" if off.any() else ""

        def plain() -> torch.Tensor:
            gathered = sources[0][places.row_map.long()].float()
            return (gathered * weights[..., None]).sum(1).to(torch.bfloat16)

        calls = tuple(
            partial(unpack_weighted, x, places, weights, out)
            for x, out in zip(sources, outs, strict=True)
        )
        return Built(calls, plain, None, difference)

    return Case("unpack_weighted", shape, num_bytes, build)
