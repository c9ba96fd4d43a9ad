"""Experts as a loop in plain torch: the CPU default."""

from __future__ import annotations

import torch

from epdecode.batch import Batch, ExpertWeights, Fp8Rows, Mark
from epdecode.experts.reference import as_fp8_input, expert_mlp, plain, plain_weights, select
from epdecode.plan import Plan


class TorchLoop:
    """One expert after the other over its valid rows; reads the counts on the host."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        fp8 = plan.model.weight_format == "fp8_block128"
        self._scale_format = plan.experts.scale_format if fp8 else None
        self._out = torch.empty(
            plan.num_local_experts,
            plan.capacity,
            plan.model.hidden,
            dtype=torch.bfloat16,
            device=device,
        )

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """The canonical form is what this member reads."""
        return weights

    def __call__(self, batch: Batch, weights: ExpertWeights, mark: Mark) -> torch.Tensor:
        """See Experts. One loop does all three stages, so down_gemm holds the whole time."""
        mark("gate_up_gemm")
        mark("act_quant")
        for expert, count in enumerate(batch.counts.tolist()):
            if count == 0:
                continue
            rows = plain(_head(batch.rows, expert, count))
            if not isinstance(batch.rows, Fp8Rows):
                rows = as_fp8_input(rows, self._scale_format)
            self._out[expert, :count] = expert_mlp(
                rows,
                plain_weights(select(weights.gate_up, expert)),
                plain_weights(select(weights.down, expert)),
                self._scale_format,
            )
        mark("down_gemm")
        return self._out


def _head(rows: torch.Tensor | Fp8Rows, expert: int, count: int) -> torch.Tensor | Fp8Rows:
    if isinstance(rows, Fp8Rows):
        return Fp8Rows(rows.data[expert, :count], rows.scales[expert, :count])
    return rows[expert, :count]
