"""rms_norm equals rms_norm_ref to one bfloat16 step (the two sum in different orders)."""

from __future__ import annotations

import pytest
import torch

from epdecode.errors import ConfigError
from epdecode.kernels.rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from tests.kernels.kit import both

SHAPES = [(1, 128), (3, 200), (5, 4096), (2, 7168), (0, 256)]


@both
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_ref(exact, tokens, hidden, dtype, device):
    x = torch.randn(tokens, hidden, device=device).bfloat16() * 3
    weight = torch.rand(hidden, device=device).to(dtype)
    got = rms_norm(x, weight, 1e-6, torch.empty_like(x))
    want = rms_norm_ref(x, weight, 1e-6, torch.empty_like(x))
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


@both
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
@pytest.mark.parametrize("with_shared", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_the_end_of_a_layer(exact, tokens, hidden, with_shared, with_norm, device):
    stream, routed, shared = (
        torch.randn(tokens, hidden, device=device).bfloat16() for _ in range(3)
    )
    before = stream.clone()
    given = (
        shared if with_shared else None,
        torch.rand(hidden, device=device) if with_norm else None,
    )
    got, want = (
        add_rms_norm(stream, routed, *given, 1e-6),
        add_rms_norm_ref(stream, routed, *given, 1e-6),
    )
    assert torch.equal(stream, before)
    step = 0 if exact else 2**-7
    torch.testing.assert_close(got.out, want.out, rtol=step, atol=0)
    torch.testing.assert_close(got.hidden, want.hidden, rtol=2 * step, atol=2 * step)
    torch.testing.assert_close(
        got.normed, want.normed, rtol=2**-6, atol=2**-5 if not exact else 1e-5
    )


def test_without_shared_rows_or_a_norm_nothing_is_copied(device):
    stream, routed = (torch.randn(3, 256, device=device).bfloat16() for _ in range(2))
    end = add_rms_norm_ref(stream, routed, None, None, 1e-6)
    assert end.out is routed
    assert end.normed is end.hidden
    assert torch.equal(end.hidden, stream + routed)


def test_shared_rows_of_another_shape_are_refused(device):
    stream = torch.zeros(2, 8).bfloat16()
    with pytest.raises(ConfigError, match=r"shared's shape is \(1, 8\); accepted: \(2, 8\)"):
        add_rms_norm(stream, stream, stream[:1], None, 1e-6)


def test_the_rule_in_its_own_words(device):
    x = torch.tensor([[3.0, 4.0]], device=device).bfloat16()
    weight = torch.tensor([1.0, 2.0], device=device)
    got = rms_norm_ref(x, weight, 0.0, torch.empty_like(x))
    root = (12.5) ** 0.5
    want = torch.tensor([[3 / root, 8 / root]], device=device)
    torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=0)


@both
def test_out_may_be_x(exact, device):
    x = torch.randn(3, 256, device=device).bfloat16()
    weight = torch.rand(256, device=device)
    want = rms_norm(x, weight, 1e-6, torch.empty_like(x))
    assert torch.equal(rms_norm(x, weight, 1e-6, x), want)


def test_a_wrong_weight_is_refused():
    x = torch.zeros(1, 8).bfloat16()
    with pytest.raises(ConfigError, match=r"weight's shape is \(7,\); accepted: \(8,\)"):
        rms_norm(x, torch.ones(7), 1e-6, x)
