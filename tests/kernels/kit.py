"""Shared by the kernel tests: both devices, poisoned buffers, what equal means where."""

from __future__ import annotations

import pytest
import torch

from epdecode.batch import Fp8Rows
from epdecode.bench.cases import POISON, quantized_difference

both = pytest.mark.parametrize(
    "exact",
    [
        pytest.param(False, id="interpreter"),
        pytest.param(True, id="gpu", marks=pytest.mark.gpu),
    ],
)
"""Every byte on the GPU; within the interpreter's own error, see quantized_difference, without."""

formats = pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """All memory a strided tensor spans, as int32 words: padding lanes too."""
    return tensor.new_empty(0).set_(tensor.untyped_storage()).view(torch.int32)


def poison(rows: Fp8Rows) -> Fp8Rows:
    """Fill data and scales, padding lanes included, with a byte nobody else writes."""
    rows.data.view(torch.uint8).fill_(POISON)
    storage(rows.scales).fill_(POISON * 0x01010101)
    return rows


def assert_same(got: Fp8Rows, want: Fp8Rows, exact: bool) -> None:
    """Equal scales, to the last padding lane, and equal data."""
    assert quantized_difference(got, want, exact) == ""
    if exact:
        assert torch.equal(storage(got.scales), storage(want.scales))
