"""The cases of `epdecode bench kernels`: each op, its shapes, its plain way, its check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from epdecode.batch import Fp8Rows, Route
from epdecode.bench.cases import (
    POISON,
    Built,
    Call,
    Case,
    expert_counts,
    quantized_difference,
    windows,
)
from epdecode.bench.kernel_shapes import Shape
from epdecode.bench.pack_cases import pack_case, unpack_weighted_case
from epdecode.kernels.fp8 import GROUP, ScaleFormat, mn_major_scales, quantize_ref
from epdecode.kernels.gate import gate_logits, gate_logits_ref
from epdecode.kernels.group_quant import Layout, empty_quantized, group_quant, group_quant_ref
from epdecode.kernels.rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from epdecode.kernels.router import RouterRule, router, router_ref
from epdecode.kernels.swiglu_quant import swiglu_quant, swiglu_quant_ref

RULES = {
    "deepseek-v3": RouterRule(
        top_k=8,
        scoring="sigmoid",
        n_group=8,
        topk_group=4,
        group_score="top2_sum",
        routed_scaling_factor=2.5,
    ),
    "qwen3": RouterRule(top_k=8),
    "gpt-oss": RouterRule(top_k=4, scoring="softmax_after_topk"),
}


def swiglu_quant_case(shape: Shape) -> Case:
    """E, M, I, live, load, scales -> SiLU * mul + quantisation of the valid rows."""
    experts, capacity, size = int(shape["E"]), int(shape["M"]), int(shape["I"])
    scale_format: ScaleFormat = "ue8m0" if shape.get("scales") == "ue8m0" else "fp32"
    counts = expert_counts(experts, capacity, int(shape["live"]), str(shape.get("load", "even")))
    scale_bytes = 4 if scale_format == "fp32" else 1
    num_bytes = sum(counts) * (4 * size + size + scale_bytes * size // GROUP)

    def build(device: torch.device, sets: int) -> Built:
        most = max(counts)
        on_device = torch.tensor(counts, dtype=torch.int32, device=device)
        inputs = windows((experts, capacity, 2 * size), most, sets, torch.bfloat16, device)
        for start in inputs:
            start[:, :most].normal_()
        payload = windows((experts, capacity, size), most, sets, torch.uint8, device)
        scales = [
            mn_major_scales(experts, capacity, size // GROUP, scale_format, device) for _ in inputs
        ]
        outs = [
            Fp8Rows(data.view(torch.float8_e4m3fn), scale)
            for data, scale in zip(payload, scales, strict=True)
        ]
        calls = tuple(
            partial(swiglu_quant, x, on_device, out, scale_format)
            for x, out in zip(inputs, outs, strict=True)
        )
        live = torch.cat([inputs[0][e, :rows] for e, rows in enumerate(counts)])
        return Built(
            calls,
            partial(_plain_swiglu_quant, live, scale_format),
            partial(_plain_swiglu_quant, inputs[0].flatten(0, 1), scale_format),
            partial(_swiglu_difference, inputs[0], on_device, scale_format),
        )

    return Case("swiglu_quant", {**shape, "live": sum(counts)}, num_bytes, build)


def _plain_swiglu_quant(gate_up: torch.Tensor, scale_format: ScaleFormat) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    rows = quantize_ref(torch.nn.functional.silu(gate.float()) * up.float(), scale_format)
    return rows.scales.T.contiguous()


def _swiglu_difference(x: torch.Tensor, counts: torch.Tensor, scale_format: ScaleFormat) -> str:
    """NaN in the padding, poisoned outputs: what is not valid is neither read nor written."""
    padded = x.clone()
    rows = torch.arange(x.shape[1], device=x.device)
    padded[rows[None, :] >= counts[:, None]] = torch.nan
    got, want = (_poisoned(x, scale_format) for _ in range(2))
    swiglu_quant(padded, counts, got, scale_format)
    swiglu_quant_ref(padded, counts, want, scale_format)
    return quantized_difference(got, want, x.is_cuda)


def _poisoned(x: torch.Tensor, scale_format: ScaleFormat) -> Fp8Rows:
    experts, capacity, double = x.shape
    data = torch.full((experts, capacity, double // 2), POISON, dtype=torch.uint8, device=x.device)
    scales = mn_major_scales(experts, capacity, double // 2 // GROUP, scale_format, x.device)
    return Fp8Rows(data.view(torch.float8_e4m3fn), scales)


def group_quant_case(shape: Shape) -> Case:
    """T, H, scales, layout -> quantisation of plain rows."""
    tokens, hidden = int(shape["T"]), int(shape["H"])
    scale_format: ScaleFormat = "ue8m0" if shape.get("scales") == "ue8m0" else "fp32"
    layout: Layout = "row" if shape.get("layout") == "row" else "column"
    scale_bytes = 4 if scale_format == "fp32" else 1
    num_bytes = tokens * (2 * hidden + hidden + scale_bytes * hidden // GROUP)

    def build(device: torch.device, sets: int) -> Built:
        inputs = [
            torch.randn(tokens, hidden, device=device).to(torch.bfloat16) for _ in range(sets)
        ]
        outs = [empty_quantized(x, scale_format, layout) for x in inputs]
        calls = tuple(
            partial(group_quant, x, scale_format, layout, out)
            for x, out in zip(inputs, outs, strict=True)
        )

        def difference() -> str:
            want = group_quant_ref(inputs[0], scale_format, layout)
            return quantized_difference(calls[0](), want, device.type == "cuda")

        plain = partial(group_quant_ref, inputs[0], scale_format, layout, outs[0])
        return Built(calls, plain, None, difference)

    return Case("group_quant", shape, num_bytes, build)


def router_case(shape: Shape) -> Case:
    """T, experts, rule -> ids and weights."""
    tokens, experts, rule = int(shape["T"]), int(shape["experts"]), RULES[str(shape["rule"])]
    num_bytes = tokens * (experts * 4 + rule.top_k * 12)

    def build(device: torch.device, sets: int) -> Built:
        bias = torch.randn(experts, device=device) * 0.1 if rule.scoring == "sigmoid" else None
        real = torch.tensor([tokens], dtype=torch.int32, device=device)
        logits = [torch.randn(tokens, experts, device=device) for _ in range(sets)]
        outs = [_empty_route(tokens, rule.top_k, device) for _ in logits]
        calls = tuple(
            partial(router, x, bias, rule, real, out) for x, out in zip(logits, outs, strict=True)
        )
        plain = partial(router_ref, logits[0], bias, rule, real, outs[0])

        def difference() -> str:
            got, want = router(logits[0], bias, rule, real), router_ref(logits[0], bias, rule, real)
            if not torch.equal(got.topk_ids, want.topk_ids):
                return "ids differ"
            off = float((got.topk_weights - want.topk_weights).abs().max())
            return "" if off <= 1e-6 else f"weights differ by {off:.2g}"

        return Built(calls, plain, None, difference)

    return Case("router", shape, num_bytes, build)


def gate_case(shape: Shape) -> Case:
    """T, experts, H, rule -> gate logits and the route that the router makes of them."""
    tokens, experts, hidden = (int(shape[key]) for key in ("T", "experts", "H"))
    rule = RULES[str(shape["rule"])]
    num_bytes = 2 * hidden * (tokens + experts) + tokens * rule.top_k * 12

    def build(device: torch.device, sets: int) -> Built:
        real = torch.tensor([tokens], dtype=torch.int32, device=device)
        weights = (torch.randn(experts, hidden, device=device) / hidden**0.5).bfloat16()
        inputs = [torch.randn(tokens, hidden, device=device).bfloat16() for _ in range(sets)]

        def run(x: torch.Tensor) -> Route:
            return router(gate_logits(x, weights), None, rule, real)

        def plain() -> Route:
            return router_ref(gate_logits_ref(inputs[0], weights), None, rule, real)

        def difference() -> str:
            parts, want = gate_logits(inputs[0], weights), gate_logits_ref(inputs[0], weights)
            off = float((parts.sum(0) - want).abs().max())
            return "" if off <= 1e-3 else f"logits differ by {off:.2g}"

        return Built(tuple(partial(run, x) for x in inputs), plain, None, difference)

    return Case("gate", shape, num_bytes, build)


def _empty_route(tokens: int, top_k: int, device: torch.device) -> Route:
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    return Route(ids, torch.empty(tokens, top_k, device=device))


def rms_norm_case(shape: Shape) -> Case:
    """T, H -> RMSNorm."""
    tokens, hidden = int(shape["T"]), int(shape["H"])

    def build(device: torch.device, sets: int) -> Built:
        weight = torch.rand(hidden, device=device).to(torch.bfloat16)
        inputs = [
            torch.randn(tokens, hidden, device=device).to(torch.bfloat16) for _ in range(sets)
        ]
        outs = [torch.empty_like(x) for x in inputs]
        calls: tuple[Call, ...] = tuple(
            partial(rms_norm, x, weight, 1e-6, out) for x, out in zip(inputs, outs, strict=True)
        )

        def difference() -> str:
            got = rms_norm(inputs[0], weight, 1e-6, torch.empty_like(inputs[0])).float()
            want = rms_norm_ref(inputs[0], weight, 1e-6, torch.empty_like(inputs[0])).float()
            # One bfloat16 step: the two sum in different orders.
            off = float(((got - want).abs() / want.abs().clamp(min=1e-3)).max())
            return "" if off <= 2**-6 else f"off by {off:.2g} of the value"

        return Built(
            calls, partial(rms_norm_ref, inputs[0], weight, 1e-6, outs[0]), None, difference
        )

    return Case("rms_norm", shape, tokens * hidden * 4, build)


def add_rms_norm_case(shape: Shape) -> Case:
    """T, H -> routed + shared + residual and the next RMSNorm."""
    tokens, hidden = int(shape["T"]), int(shape["H"])

    def build(device: torch.device, sets: int) -> Built:
        weight = torch.rand(hidden, device=device).to(torch.bfloat16)

        def rows() -> torch.Tensor:
            return torch.randn(tokens, hidden, device=device).to(torch.bfloat16)

        inputs = [(rows(), rows(), rows(), weight, 1e-6) for _ in range(sets)]
        calls: tuple[Call, ...] = tuple(partial(add_rms_norm, *one) for one in inputs)

        def difference() -> str:
            got, want = add_rms_norm(*inputs[0]), add_rms_norm_ref(*inputs[0])
            for name in ("out", "hidden", "normed"):
                off = (getattr(got, name).float() - getattr(want, name).float()).abs().max()
                # Values are a few units large: a bfloat16 step there.
                if not float(off) <= 2**-4:
                    return f"{name} off by {float(off):.2g}"
            return ""

        return Built(calls, partial(add_rms_norm_ref, *inputs[0]), None, difference)

    return Case("add_rms_norm", shape, tokens * hidden * 12, build)


CASES: dict[str, Callable[[Shape], Case]] = {
    "swiglu_quant": swiglu_quant_case,
    "group_quant": group_quant_case,
    "gate": gate_case,
    "router": router_case,
    "rms_norm": rms_norm_case,
    "add_rms_norm": add_rms_norm_case,
    "pack": pack_case,
    "unpack_weighted": unpack_weighted_case,
}
