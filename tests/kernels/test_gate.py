"""gate_logits: its parts add up to the plain product, and the router reads them as they are."""

from __future__ import annotations

import pytest
import torch

from epdecode.errors import ConfigError
from epdecode.kernels.gate import gate_logits, gate_logits_ref
from epdecode.kernels.router import RouterRule, router, router_ref
from tests.kernels.kit import both

SHAPES = [
    # tokens, experts, hidden
    (1, 8, 128),
    (5, 72, 384),
    (17, 64, 200),
    (33, 130, 256),
    (0, 8, 128),
]


def inputs(tokens, experts, hidden, device):
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    return x, (torch.randn(experts, hidden, device=device) / hidden**0.5).bfloat16()


@both
@pytest.mark.parametrize(("tokens", "experts", "hidden"), SHAPES)
def test_parts_add_up(exact, tokens, experts, hidden, device):
    x, gate = inputs(tokens, experts, hidden, device)
    parts = gate_logits(x, gate)
    assert parts.shape[1:] == (tokens, experts)
    torch.testing.assert_close(parts.sum(0), gate_logits_ref(x, gate), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 100, 128, 1000])
@pytest.mark.parametrize(
    ("experts", "hidden"), [(256, 7168), (128, 2048), (384, 7168), (160, 5120)]
)
def test_model_shapes(tokens, experts, hidden, device):
    x, gate = inputs(tokens, experts, hidden, device)
    want = x.double() @ gate.double().T
    torch.testing.assert_close(gate_logits(x, gate).double().sum(0), want, rtol=1e-4, atol=1e-4)


@both
def test_a_row_of_nan_stays_in_its_row(exact, device):
    x, gate = inputs(6, 16, 256, device)
    want = gate_logits(x, gate)
    x[2] = torch.nan
    got = gate_logits(x, gate)
    assert got[:, 2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[:, others], want[:, others])


@both
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "softmax_after_topk"])
def test_the_router_adds_the_parts_in_order(exact, scoring, device):
    rule = RouterRule(top_k=3, scoring=scoring, routed_scaling_factor=2.5)
    parts = torch.randn(5, 7, 12, device=device)
    bias = torch.randn(12, device=device) * 0.1 if scoring == "sigmoid" else None
    real = torch.tensor([6], dtype=torch.int32, device=device)
    got, want = (op(parts, bias, rule, real) for op in (router, router_ref))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    plain = router_ref(total, bias, rule, real)
    for route in (got, want):
        assert torch.equal(route.topk_ids, plain.topk_ids)
        torch.testing.assert_close(route.topk_weights, plain.topk_weights, rtol=2e-6, atol=1e-8)


def test_a_gate_of_another_size_is_refused(device):
    x, gate = inputs(2, 8, 128, device)
    with pytest.raises(ConfigError, match="gate's hidden is 64; accepted: 128"):
        gate_logits(x, gate[:, :64].contiguous())
