"""Experts that take the faster backend for each load: triton_gemm, and DeepGEMM where it is better.

Which is better stands in a table: `epdecode bench experts --tune` measures one for this machine,
else the rule of ``expert_choice`` holds. Batches of a bucket all get the same choice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from epdecode.batch import Batch, ExpertWeights, Mark
from epdecode.errors import EnvironmentFault
from epdecode.experts.triton_gemm import TritonGemm, shape_of
from epdecode.experts.tuned_table import table_of
from epdecode.plan import Plan
from epdecode.plan.expert_choice import Backend, ExpertShape, Table, choose
from epdecode.plan.experts import MASKED_TILE
from epdecode.registry import load_member

log = logging.getLogger(__name__)

RIVALS = {"deepgemm": "epdecode.experts.deepgemm:DeepGemm"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """One layer's weights in each backend's form; none of them copies the matrices."""

    triton_gemm: ExpertWeights
    deepgemm: Any


class TunedExperts:
    """triton_gemm for every load, DeepGEMM for those the table gives it, if it can be loaded."""

    def __init__(self, plan: Plan, device: torch.device, table: Table | None = None) -> None:
        self._table = table_of(device) if table is None else table
        self._shape = shape_of(plan)
        self._triton = TritonGemm(plan, device, self._table)
        self._rival = _build_rival(plan, device, self._shape, self._table)

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """See Experts."""
        rival = None if self._rival is None else self._rival.prepare(weights)
        return Prepared(self._triton.prepare(weights), rival)

    def __call__(self, batch: Batch, weights: Prepared, mark: Mark) -> torch.Tensor:
        """See Experts."""
        if self._backend(batch.expected_rows) == "triton_gemm":
            return self._triton(batch, weights.triton_gemm, mark)
        out: torch.Tensor = self._rival(batch, weights.deepgemm, mark)
        return out

    def _backend(self, rows: int) -> Backend:
        if self._rival is None:
            return "triton_gemm"
        return choose(self._shape, rows, self._table).backend


def most_rows(plan: Plan) -> int:
    """Mean rows per expert at the largest batch, rounded up."""
    rows = max(plan.buckets, default=1) * plan.world_size * plan.model.top_k
    return -(-rows // plan.num_experts)


def _build_rival(plan: Plan, device: torch.device, shape: ExpertShape, table: Table) -> Any:
    """DeepGEMM's member where some load wants it; None, and a line in the log, if it cannot run."""
    loads = range(1, most_rows(plan) + 1)
    if all(choose(shape, rows, table).backend == "triton_gemm" for rows in loads):
        return None
    if plan.model.weight_format != "fp8_block128" or plan.capacity % MASKED_TILE:
        log.info(
            "auto: triton_gemm alone: DeepGEMM takes FP8 weights and %d-row tiles", MASKED_TILE
        )
        return None
    try:
        return load_member("experts", RIVALS, "deepgemm")(plan, device)
    except EnvironmentFault as error:
        log.info("auto: triton_gemm alone: %s", error)
        return None
