"""swiglu (bfloat16) equals swiglu_ref over valid rows and leaves the others alone."""

from __future__ import annotations

import pytest
import torch

from epdecode.kernels.swiglu import swiglu, swiglu_packed, swiglu_packed_ref, swiglu_ref
from tests.kernels.kit import both


@both
@pytest.mark.parametrize("counts", [[2, 0, 5], [0, 0, 0], [5, 5, 5]])
@pytest.mark.parametrize("size", [96, 1500])
def test_masked_equals_ref(exact, counts, size, device):
    x = torch.randn(3, 5, 2 * size, device=device).bfloat16()
    for expert, rows in enumerate(counts):
        x[expert, rows:] = torch.nan
    on_device = torch.tensor(counts, dtype=torch.int32, device=device)
    got, want = (torch.full((3, 5, size), 9.0, device=device).bfloat16() for _ in range(2))
    swiglu(x, on_device, got)
    swiglu_ref(x, on_device, want)
    torch.testing.assert_close(got, want, rtol=0 if exact else 2**-6, atol=0)


@both
@pytest.mark.parametrize("alignment", [1, 8])
def test_packed_equals_ref(exact, alignment, device):
    counts = torch.tensor([3, 0, 9], dtype=torch.int32, device=device)
    x = torch.randn(40, 256, device=device).bfloat16()
    got, want = (torch.full((40, 128), 9.0, device=device).bfloat16() for _ in range(2))
    swiglu_packed(x, counts, alignment, got)
    swiglu_packed_ref(x, counts, alignment, want)
    torch.testing.assert_close(got, want, rtol=0 if exact else 2**-6, atol=0)
    assert (got == 9).all(dim=1).sum() == 28


def test_zero_rows(device):
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    out = torch.empty(2, 0, 64, device=device).bfloat16()
    assert swiglu(torch.empty(2, 0, 128, device=device).bfloat16(), counts, out) is out
