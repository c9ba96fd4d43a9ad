"""Experts as a loop in plain torch over packed rows: the CPU default of packed transports."""

from __future__ import annotations

import torch

from epdecode.batch import Batch, ExpertWeights, Fp8Rows, Mark, Rows
from epdecode.experts.blocks import block_ends
from epdecode.experts.reference import as_fp8_input, expert_mlp, plain, plain_weights, select
from epdecode.plan import Plan


class TorchLoopPacked:
    """One expert after the other over its block; reads the counts on the host."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        fp8 = plan.model.weight_format == "fp8_block128"
        self._scale_format = plan.experts.scale_format if fp8 else None
        self._alignment = plan.transport.row_alignment
        shape = (plan.transport.packed_rows, plan.model.hidden)
        self._out = torch.empty(shape, dtype=torch.bfloat16, device=device)

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """The canonical form is what this member reads."""
        return weights

    def __call__(self, batch: Batch, weights: ExpertWeights, mark: Mark) -> torch.Tensor:
        """See Experts. One loop does all three stages, so down_gemm holds the whole time."""
        mark("gate_up_gemm")
        mark("act_quant")
        ends = block_ends(batch.counts, self._alignment)
        for expert, block in enumerate(_blocks(batch.counts, ends)):
            if block.start == block.stop:
                continue
            rows = plain(_take(batch.rows, block))
            if not isinstance(batch.rows, Fp8Rows):
                rows = as_fp8_input(rows, self._scale_format)
            self._out[block] = expert_mlp(
                rows,
                plain_weights(select(weights.gate_up, expert)),
                plain_weights(select(weights.down, expert)),
                self._scale_format,
            )
        mark("down_gemm")
        return self._out


def _blocks(counts: torch.Tensor, ends: torch.Tensor) -> list[slice]:
    pairs = zip(counts.tolist(), ends.tolist(), strict=True)
    return [slice(end - count, end) for count, end in pairs]


def _take(rows: Rows, block: slice) -> Rows:
    if isinstance(rows, Fp8Rows):
        return Fp8Rows(rows.data[block], rows.scales[block])
    return rows[block]
