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
from epdecode.experts.tiles import grouped_tiles
from epdecode.kernels.expert_quant import quantize_rows
from epdecode.kernels.fp8 import mn_major_scales, num_groups
from epdecode.kernels.grouped_gemm import down, gate_up_swiglu
from epdecode.plan import Plan

Chain = Callable[[Rows, ExpertWeights, torch.Tensor, int, torch.Tensor, Mark], None]
"""chain(rows, weights, counts, expected_rows, out, mark) writes valid rows of out [E, M, H]."""


class TritonGemm:
    """Chooses its chain while building; workspaces shared by all layers."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        shape = (plan.num_local_experts, plan.capacity, plan.model.hidden)
        self._fp8 = plan.model.weight_format == "fp8_block128"
        self._out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self._chain = _choose_chain(plan, device)
        self._enter: Callable[[Batch], Rows] = _as_is
        if self._fp8 and plan.transport.wire == "bf16":
            self._quantised = _empty_fp8(shape, device)
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
        rows = self._enter(batch)
        self._chain(rows, weights, batch.counts, batch.expected_rows, self._out, mark)
        return self._out

    def _quantise(self, batch: Batch) -> Rows:
        if not isinstance(batch.rows, torch.Tensor):
            return batch.rows
        return quantize_rows(batch.rows, batch.counts, self._quantised)


class TwoKernels:
    """Gate-up with the activation and its quantisation, then down, through plain Triton."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        shape = (plan.num_local_experts, plan.capacity, plan.model.expert_size)
        fp8 = plan.model.weight_format == "fp8_block128"
        self._act: Rows = (
            _empty_fp8(shape, device)
            if fp8
            else torch.empty(shape, dtype=torch.bfloat16, device=device)
        )

    def __call__(
        self,
        rows: Rows,
        weights: ExpertWeights,
        counts: torch.Tensor,
        expected_rows: int,
        out: torch.Tensor,
        mark: Mark,
    ) -> None:
        first, second = grouped_tiles(expected_rows, isinstance(rows, Fp8Rows))
        gate_up_swiglu(rows, weights.gate_up, counts, self._act, first)
        mark("gate_up_gemm")
        mark("act_quant")
        down(self._act, weights.down, counts, out, second)
        mark("down_gemm")


def _empty_fp8(shape: tuple[int, int, int], device: torch.device) -> Fp8Rows:
    experts, rows, size = shape
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(data, mn_major_scales(experts, rows, num_groups(size), "fp32", device))


def _as_is(batch: Batch) -> Rows:
    return batch.rows


def _choose_chain(plan: Plan, device: torch.device) -> Chain:
    return TwoKernels(plan, device)
