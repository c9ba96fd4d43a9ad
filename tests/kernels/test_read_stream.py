"""read_stream reads every word: its xors are those of plain torch."""

from __future__ import annotations

import pytest
import torch

from epdecode.kernels.read_stream import BLOCK, read_stream, read_stream_ref
from tests.kernels.kit import both


@both
@pytest.mark.parametrize(("blocks", "programs"), [(7, 3), (1, 2), (4, 4)])
def test_equals_ref(exact, blocks, programs, device):
    source = torch.randint(-(2**31), 2**31, (blocks * BLOCK,), device=device).int()
    got, want = (torch.full((programs,), 5, dtype=torch.int32, device=device) for _ in range(2))
    read_stream(source, got)
    read_stream_ref(source, want)
    assert torch.equal(got, want)
