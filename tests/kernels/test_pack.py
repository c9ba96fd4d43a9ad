"""place_routes, pack and unpack_weighted equal their plain twins."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epdecode.batch import Fp8Rows
from epdecode.errors import ConfigError
from epdecode.kernels.fp8 import mn_major_scales, quantize_ref
from epdecode.kernels.pack import pack, pack_ref, unpack_weighted, unpack_weighted_ref
from epdecode.kernels.place_routes import (
    Places,
    empty_places,
    most_packed_rows,
    place_routes,
    place_routes_ref,
)
from tests.kernels.kit import both, poison, storage

SHAPES = [
    # received rows, top_k, local experts, alignment
    (0, 2, 3, 4),
    (1, 1, 1, 1),
    (7, 3, 5, 4),
    (200, 4, 6, 16),
    (500, 8, 33, 8),
]


def local_ids(received: int, top_k: int, experts: int, device) -> torch.Tensor:
    """Distinct local ids, about a tenth absent, the last three rows without any."""
    scores = torch.rand(received, experts + 1 + experts // 8 + top_k)
    ids = scores.topk(top_k, dim=1).indices
    ids[ids >= experts] = -1
    ids[max(1, received - 3) :] = -1
    return ids.to(device)


def poisoned(received: int, top_k: int, experts: int, alignment: int, device) -> Places:
    rows = most_packed_rows(received, top_k, experts, alignment)
    places = empty_places(received, top_k, experts, rows, device)
    for field in dataclasses.fields(places):
        getattr(places, field.name).fill_(12345)
    return places


@both
@pytest.mark.parametrize(("received", "top_k", "experts", "alignment"), SHAPES)
def test_places_equal_ref(exact, received, top_k, experts, alignment, device):
    ids = local_ids(received, top_k, experts, device)
    got, want = (poisoned(received, top_k, experts, alignment, device) for _ in range(2))
    place_routes(ids, alignment, got)
    place_routes_ref(ids, alignment, want)
    for name in ("labels", "sources", "counts", "row_map", "num_received"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [8, 32, 256])
def test_many_routes_are_placed_as_ref_does(experts, device):
    ids = local_ids(20000, 8, experts, device)
    got, want = (poisoned(20000, 8, experts, 128, device) for _ in range(2))
    place_routes(ids, 128, got)
    place_routes_ref(ids, 128, want)
    for name in ("labels", "sources", "counts", "row_map", "num_received"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@both
@pytest.mark.parametrize(("received", "top_k", "experts", "alignment"), SHAPES)
def test_pack_and_unpack_equal_ref(exact, received, top_k, experts, alignment, device):
    hidden = 256
    ids = local_ids(received, top_k, experts, device)
    places = place_routes(ids, alignment, poisoned(received, top_k, experts, alignment, device))
    rows = places.labels.numel()
    x = torch.randn(received, hidden, device=device).bfloat16()
    got, want = (torch.full((rows, hidden), 7.0, device=device).bfloat16() for _ in range(2))
    assert torch.equal(pack(x, places, got), pack_ref(x, places, want))

    y = torch.randn(rows, hidden, device=device).bfloat16()
    y[places.labels < 0] = torch.nan
    weights = torch.rand(received, top_k, device=device)
    weights[ids < 0] = torch.nan
    got, want = (torch.full((received, hidden), 7.0, device=device).bfloat16() for _ in range(2))
    unpack_weighted(y, places, weights, got)
    unpack_weighted_ref(y, places, weights, want)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)


@both
@pytest.mark.parametrize("hidden", [128, 640])
def test_quantised_rows_bring_their_scales_into_the_gemm_layout(exact, hidden, device):
    ids = local_ids(9, 3, 4, device)
    places = place_routes(ids, 8, poisoned(9, 3, 4, 8, device))
    rows = places.labels.numel()
    source = quantize_ref(torch.randn(9, hidden, device=device))

    def out() -> Fp8Rows:
        data = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=device)
        return poison(Fp8Rows(data, mn_major_scales(1, rows, hidden // 128, device=device)[0]))

    got, want = out(), out()
    pack(source, places, got)
    pack_ref(source, places, want)
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(storage(got.scales), storage(want.scales))


@both
def test_identity_experts_and_unit_weights_give_the_rows_back(exact, device):
    x = torch.randn(6, 128, device=device).bfloat16()
    ids = torch.arange(6, device=device)[:, None] % 4
    places = place_routes(ids, 16, poisoned(6, 1, 4, 16, device))
    packed = pack(x, places, torch.empty(places.labels.numel(), 128, device=device).bfloat16())
    weights = torch.ones(6, 1, device=device)
    assert torch.equal(unpack_weighted(packed, places, weights, torch.empty_like(x)), x)
    assert places.counts.tolist() == [2, 2, 1, 1]


@both
def test_repeated_ids_never_write_past_the_buffers(exact, device):
    ids = torch.zeros(8, 4, dtype=torch.int64, device=device)
    places = poisoned(8, 4, 2, 1, device)
    place_routes(ids, 1, places)
    assert places.row_map.max() < places.labels.numel()


def test_too_few_packed_rows_are_refused(device):
    places = empty_places(4, 2, 2, 7, device)
    with pytest.raises(ConfigError, match="number of packed rows is 7; accepted: 8 or more"):
        place_routes(torch.zeros(4, 2, dtype=torch.int64, device=device), 1, places)


def test_rows_of_another_type_are_refused(device):
    places = empty_places(1, 1, 1, 1, device)
    x = torch.zeros(1, 128, device=device).bfloat16()
    with pytest.raises(ConfigError, match="out's type is Fp8Rows; accepted: Tensor"):
        pack(x, places, quantize_ref(x))
