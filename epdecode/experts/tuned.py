"""Experts that run each load on the backend the plan gives it: triton_gemm or DeepGEMM.

The plan has the rule or this machine's table (`epdecode bench experts --tune`) say which is faster.
Batches of a bucket all get the same choice.
"""

from __future__ import annotations

from typing import Any

import torch

from epdecode.batch import Batch, ExpertWeights, Mark
from epdecode.experts import MEMBERS
from epdecode.plan import Plan
from epdecode.plan.expert_loads import backends_of, choice_at
from epdecode.registry import load_member


class TunedExperts:
    """The backends that some load of the plan wants, and no other."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._loads = plan.experts.loads
        self._backends = {
            name: load_member("experts", MEMBERS, name)(plan, device)
            for name in backends_of(self._loads)
        }

    def prepare(self, weights: ExpertWeights) -> dict[str, Any]:
        """The weights in each backend's form; none of them copies the matrices."""
        return {name: backend.prepare(weights) for name, backend in self._backends.items()}

    def __call__(self, batch: Batch, weights: dict[str, Any], mark: Mark) -> torch.Tensor:
        """See Experts."""
        name = choice_at(self._loads, batch.expected_rows).backend
        out: torch.Tensor = self._backends[name](batch, weights[name], mark)
        return out
