"""Experts through DeepGEMM's grouped FP8 GEMMs, masked layout."""

from __future__ import annotations

from collections.abc import Callable

import deep_gemm
import torch

from epdecode.batch import Batch, ExpertWeights, Fp8Rows, Mark, Rows
from epdecode.experts.deepgemm_weights import Prepared, prepare_weights, require_fp8_weights
from epdecode.kernels.fp8 import mn_major_scales, num_groups, quantize_ref
from epdecode.kernels.swiglu_quant import empty_out, swiglu_quant
from epdecode.plan import Plan


class DeepGemm:
    """Two masked GEMMs and the activation between; workspaces shared by all layers."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        require_fp8_weights(plan.model)
        experts, rows = plan.num_local_experts, plan.capacity
        size, hidden = plan.model.expert_size, plan.model.hidden
        self._scale_format = plan.experts.scale_format
        self._gate_up = torch.empty(experts, rows, 2 * size, dtype=torch.bfloat16, device=device)
        self._act = empty_out(experts, rows, size, self._scale_format, device)
        self._out = torch.empty(experts, rows, hidden, dtype=torch.bfloat16, device=device)
        self._activate = self._activation(plan)
        self._enter: Callable[[Rows], Fp8Rows] = (
            _as_is if plan.transport.wire == "fp8" else self._quantize_plain
        )

    def _activation(self, plan: Plan) -> Callable[[torch.Tensor], Fp8Rows]:
        if not plan.experts.fused_activation:
            return self._activate_plain
        if not plan.experts.fused_quant_layout:
            return self._activate_then_transpose
        return self._activate_fused

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """See Experts."""
        return prepare_weights(weights)

    def __call__(self, batch: Batch, weights: Prepared, mark: Mark) -> torch.Tensor:
        """See Experts."""
        rows = self._enter(batch.rows)
        self._gemm(rows, weights.gate_up, self._gate_up, batch)
        mark("gate_up_gemm")
        activation = self._activate(batch.counts)
        mark("act_quant")
        self._gemm(activation, weights.down, self._out, batch)
        mark("down_gemm")
        return self._out

    def _gemm(
        self,
        rows: Fp8Rows,
        weights: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        batch: Batch,
    ) -> None:
        deep_gemm.m_grouped_fp8_gemm_nt_masked(
            (rows.data, rows.scales), weights, out, batch.counts, batch.expected_rows
        )

    def _activate_fused(self, counts: torch.Tensor) -> Fp8Rows:
        return swiglu_quant(self._gate_up, counts, self._act, self._scale_format)

    def _activate_then_transpose(self, counts: torch.Tensor) -> Fp8Rows:
        """One kernel for the activation, then a pass of its own for the scales' layout."""
        row_major = Fp8Rows(
            self._act.data,
            torch.empty(self._act.scales.shape, dtype=self._act.scales.dtype, device=counts.device),
        )
        done = swiglu_quant(self._gate_up, counts, row_major, self._scale_format)
        self._act.scales.copy_(done.scales)
        return self._act

    def _activate_plain(self, counts: torch.Tensor) -> Fp8Rows:
        """Plain torch over the whole padded block: what the fused kernel replaces."""
        gate, up = self._gate_up.float().chunk(2, dim=-1)
        rows = quantize_ref(torch.nn.functional.silu(gate) * up, self._scale_format)
        self._act.data.copy_(rows.data)
        self._act.scales.copy_(rows.scales)
        return self._act

    def _quantize_plain(self, rows: Rows) -> Fp8Rows:
        """bfloat16 wire: quantise the whole padded block after it arrived."""
        if isinstance(rows, Fp8Rows):
            return rows
        quantised = quantize_ref(rows, self._scale_format)
        experts, capacity, hidden = rows.shape
        groups = num_groups(hidden, "hidden")
        scales = mn_major_scales(experts, capacity, groups, self._scale_format, rows.device)
        scales.copy_(quantised.scales)
        return Fp8Rows(quantised.data, scales)


def _as_is(rows: Rows) -> Fp8Rows:
    if not isinstance(rows, Fp8Rows):
        raise TypeError("an FP8 wire delivers Fp8Rows")
    return rows
