"""The streams touch every word: xors as plain torch has them, copies equal."""

from __future__ import annotations

import pytest
import torch

from epdecode.kernels.streams import BLOCK, copy_stream, read_stream, read_stream_ref
from tests.kernels.kit import both


@both
@pytest.mark.parametrize(("blocks", "programs"), [(7, 3), (1, 2), (4, 4)])
def test_read_equals_ref(exact, blocks, programs, device):
    source = torch.randint(-(2**31), 2**31, (blocks * BLOCK,), device=device).int()
    got, want = (torch.full((programs,), 5, dtype=torch.int32, device=device) for _ in range(2))
    read_stream(source, got)
    read_stream_ref(source, want)
    assert torch.equal(got, want)


@both
def test_copy_copies_all(exact, device):
    source = torch.randint(0, 2**31, (3 * BLOCK,), device=device).int()
    target = torch.zeros_like(source)
    copy_stream(source, target)
    assert torch.equal(source, target)
