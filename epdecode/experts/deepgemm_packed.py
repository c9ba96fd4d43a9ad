"""Experts through DeepGEMM's grouped FP8 GEMMs, contiguous layout.

The GEMMs find each expert's block by prefix sums of the counts: tiles of gaps and of the tail are
not visited, and nothing depends on how many rows arrived, so one compiled kernel serves all loads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import deep_gemm
import torch

from epdecode.batch import Batch, ExpertWeights, Fp8Rows, Mark, Rows
from epdecode.errors import EnvironmentFault
from epdecode.experts.blocks import block_ends
from epdecode.experts.carve import carve, carve_quantised
from epdecode.experts.deepgemm_weights import Prepared, prepare_weights, require_fp8_weights
from epdecode.kernels.fp8 import quantize_ref
from epdecode.kernels.group_quant import group_quant
from epdecode.kernels.swiglu_quant import swiglu_quant_packed
from epdecode.plan import Plan

log = logging.getLogger(__name__)


class DeepGemmPacked:
    """Two contiguous GEMMs and the activation between, in the two workspaces of the plan."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        require_fp8_weights(plan.model)
        agree_on_alignment(plan.transport.row_alignment)
        self._alignment = plan.transport.row_alignment
        self._scale_format = plan.experts.scale_format
        first, second = (
            torch.empty(size, dtype=torch.uint8, device=device)
            for size in plan.experts.workspace_bytes
        )
        rows, size, hidden = (
            plan.transport.packed_rows,
            plan.model.expert_size,
            plan.model.hidden,
        )
        fused = plan.experts.fused_activation
        self._gate_up = carve(first, (rows, 2 * size), torch.bfloat16)
        self._act = carve_quantised(second if fused else first, rows, size, self._scale_format)
        self._out = carve(first if fused else second, (rows, hidden), torch.bfloat16)
        self._activate = self._activation(plan, second)
        self._enter = self._entrance(plan, second)

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """See Experts."""
        return prepare_weights(weights)

    def __call__(self, batch: Batch, weights: Prepared, mark: Mark) -> torch.Tensor:
        """See Experts."""
        ends = block_ends(batch.counts, self._alignment)
        self._gemm(self._enter(batch.rows), weights.gate_up, self._gate_up, ends, batch)
        mark("gate_up_gemm")
        activation = self._activate(batch.counts)
        mark("act_quant")
        self._gemm(activation, weights.down, self._out, ends, batch)
        mark("down_gemm")
        return self._out

    def _gemm(
        self,
        rows: Fp8Rows,
        weights: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        ends: torch.Tensor,
        batch: Batch,
    ) -> None:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (rows.data, rows.scales),
            weights,
            out,
            ends,
            use_psum_layout=True,
            expected_m_for_psum_layout=batch.expected_rows,
        )

    def _activation(self, plan: Plan, second: torch.Tensor) -> Callable[[torch.Tensor], Fp8Rows]:
        rows, size = self._act.data.shape
        if not plan.experts.fused_activation:
            self._plain_act = carve(second, (rows, size), torch.float32)
            return self._activate_plain
        if plan.experts.fused_quant_layout:
            return self._activate_fused
        behind = self._act.data.nbytes + self._act.scales.nbytes
        scales = carve(second, tuple(self._act.scales.shape), self._act.scales.dtype, behind)
        self._row_major = Fp8Rows(self._act.data, scales)
        return self._activate_then_transpose

    def _activate_fused(self, counts: torch.Tensor) -> Fp8Rows:
        return swiglu_quant_packed(
            self._gate_up, counts, self._alignment, self._act, self._scale_format
        )

    def _activate_then_transpose(self, counts: torch.Tensor) -> Fp8Rows:
        """One kernel for the activation, then a pass of its own for the scales' layout."""
        swiglu_quant_packed(
            self._gate_up, counts, self._alignment, self._row_major, self._scale_format
        )
        self._act.scales.copy_(self._row_major.scales)
        return self._act

    def _activate_plain(self, counts: torch.Tensor) -> Fp8Rows:
        """Plain torch over all rows, gaps and tail too: what the fused kernel replaces."""
        gate, up = self._gate_up.chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate.float()), up.float(), out=self._plain_act)
        made = quantize_ref(self._plain_act, self._scale_format)
        self._act.data.copy_(made.data)
        self._act.scales.copy_(made.scales)
        return self._act

    def _entrance(self, plan: Plan, second: torch.Tensor) -> Callable[[Rows], Fp8Rows]:
        """How delivered rows become the first GEMM's input."""
        if plan.transport.wire == "fp8":
            return _as_is
        shape = (plan.transport.packed_rows, plan.model.hidden)
        room = carve_quantised(second, *shape, self._scale_format)

        def quantise(rows: Rows) -> Fp8Rows:
            assert isinstance(rows, torch.Tensor), "a bfloat16 wire delivers a tensor"
            return group_quant(rows, self._scale_format, "column", room)

        return quantise


def agree_on_alignment(rows: int) -> None:
    """Make the library's row alignment of contiguous blocks the plan's, or refuse.

    Raises EnvironmentFault when it cannot be changed to ``rows``.
    """
    asks: int = deep_gemm.get_m_alignment_for_contiguous_layout()
    if asks == rows:
        return
    set_alignment: Any = getattr(deep_gemm, "set_mk_alignment_for_contiguous_layout", None)
    if set_alignment is None:
        raise EnvironmentFault(
            f"experts.row_alignment: the plan has {rows} rows, this DeepGEMM asks for {asks} and "
            f"cannot be told otherwise; accepted: {asks}"
        )
    set_alignment(rows)
    log.info("DeepGEMM's row alignment set from %d to %d", asks, rows)


def _as_is(rows: Rows) -> Fp8Rows:
    assert isinstance(rows, Fp8Rows), "an FP8 wire delivers Fp8Rows"
    return rows
