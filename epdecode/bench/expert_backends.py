"""The expert backends that can be timed here, each as a call per layer over a case's inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from epdecode.batch import Fp8Rows, no_mark
from epdecode.bench.expert_cases import ExpertCase, Inputs
from epdecode.errors import EnvironmentFault
from epdecode.experts.chains import Chain, ChainShape, build_chain
from epdecode.kernels.swiglu_quant import empty_out, swiglu_quant
from epdecode.plan.expert_choice import Choice

Layer = Callable[[int], None]
"""Enqueues one layer's chain into the case's ``out``."""


def triton_layer(inputs: Inputs, chain: Chain, choice: Choice) -> Layer:
    """Our own chain, cut as ``choice`` says."""

    def layer(index: int) -> None:
        weights = inputs.layers[index]
        chain(inputs.x, weights, inputs.counts, inputs.out, choice, no_mark)

    return layer


def triton_chain(case: ExpertCase, inputs: Inputs) -> Chain:
    """The chain triton_gemm would build for this case, with its workspaces."""
    return build_chain(
        ChainShape(shape=case.shape, capacity=inputs.out.shape[1], fp8=True, packed_scales=False),
        inputs.out.device,
    )


def deepgemm_layer(case: ExpertCase, inputs: Inputs) -> Layer:
    """Two masked DeepGEMM calls and our activation between. Raises EnvironmentFault without it."""
    try:
        import deep_gemm
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise EnvironmentFault(f"deep_gemm cannot be loaded: {error or 'no message'}") from error
    experts, capacity, _ = inputs.out.shape
    device, size = inputs.out.device, case.shape.size
    both = torch.empty(experts, capacity, 2 * size, dtype=torch.bfloat16, device=device)
    act = empty_out(experts, capacity, size, "fp32", device)
    gemm = partial(
        deep_gemm.m_grouped_fp8_gemm_nt_masked, masked_m=inputs.counts, expected_m=case.rows
    )

    def layer(index: int) -> None:
        weights = inputs.layers[index]
        gate_up, down = weights.gate_up, weights.down
        assert isinstance(gate_up, Fp8Rows), "the bench's weights are FP8"
        assert isinstance(down, Fp8Rows), "the bench's weights are FP8"
        gemm((inputs.x.data, inputs.x.scales), (gate_up.data, gate_up.scales), both)
        swiglu_quant(both, inputs.counts, act)
        gemm((act.data, act.scales), (down.data, down.scales), inputs.out)

    return layer
