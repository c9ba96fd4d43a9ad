"""Experts through our own grouped GEMMs in Triton: any GPU with FP8, no other library.

On Hopper with FP8 weights the whole chain is one persistent kernel; elsewhere, with bfloat16
weights, packed scales or shapes it does not take, two kernels: gate-up with the activation and
its quantisation inside, then down.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from epdecode.batch import Batch, ExpertWeights, Fp8Rows, Mark, Rows
from epdecode.errors import ConfigError
from epdecode.experts.chains import ChainShape, build_chain, empty_fp8
from epdecode.kernels.expert_quant import quantize_rows
from epdecode.plan import Plan
from epdecode.plan.expert_choice import ExpertShape
from epdecode.plan.expert_loads import choice_at


class TritonGemm:
    """Chooses its kernels while building, their tiles by the load; workspaces are shared."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        shape = (plan.num_local_experts, plan.capacity, plan.model.hidden)
        self._loads = plan.experts.loads
        self._fp8 = plan.model.weight_format == "fp8_block128"
        self._out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self._chain = build_chain(
            ChainShape(
                shape=shape_of(plan),
                capacity=plan.capacity,
                fp8=self._fp8,
                packed_scales=plan.experts.scale_format == "ue8m0",
            ),
            device,
        )
        self._enter: Callable[[Batch], Rows] = _as_is
        if self._fp8 and plan.transport.wire == "bf16":
            self._quantised = empty_fp8(shape, device)
            self._enter = self._quantise

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """The canonical form is what the kernels read; no copy is made."""
        for name, matrix in (("gate_up", weights.gate_up), ("down", weights.down)):
            if isinstance(matrix, Fp8Rows) != self._fp8:
                raise ConfigError(
                    f"experts.name: triton_gemm was built for "
                    f"{'fp8_block128' if self._fp8 else 'bf16'} weights and {name} is not that"
                )
        return weights

    def __call__(self, batch: Batch, weights: ExpertWeights, mark: Mark) -> torch.Tensor:
        """See Experts."""
        choice = choice_at(self._loads, batch.expected_rows)
        self._chain(self._enter(batch), weights, batch.counts, self._out, choice, mark)
        return self._out

    def _quantise(self, batch: Batch) -> Rows:
        assert isinstance(batch.rows, torch.Tensor), "a bfloat16 wire delivers a tensor"
        return quantize_rows(batch.rows, batch.counts, self._quantised)


def shape_of(plan: Plan) -> ExpertShape:
    """The experts that a plan's member is built for."""
    return ExpertShape(
        experts=plan.num_local_experts, hidden=plan.model.hidden, size=plan.model.expert_size
    )


def _as_is(batch: Batch) -> Rows:
    return batch.rows
