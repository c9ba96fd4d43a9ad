"""Small configs, models and plans for tests, in one line each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from epdecode.config import Config
from epdecode.config.load import load_config, load_model
from epdecode.models import ModelShape, RouterShape
from epdecode.plan import Plan, make_plan

TINY = Path(__file__).parent.parent / "configs" / "cpu-tiny.yaml"


def small_config(*overrides: str) -> Config:
    """cpu-tiny with overrides."""
    return load_config(TINY, overrides)


def small_model(**fields: object) -> ModelShape:
    """The tiny model with other fields."""
    return replace(load_model("tiny"), **fields)


def ll_model(**fields: object) -> ModelShape:
    """The smallest shape DeepEP's low-latency kernels take."""
    wide = {"hidden": 2048, "expert_size": 128, "num_shared_experts": 0, **fields}
    return small_model(**wide)


def plain_router(**fields: object) -> RouterShape:
    """Softmax over all experts, no groups, no bias."""
    return replace(RouterShape(), **fields)


def small_plan(world_size: int, *overrides: str, model: ModelShape | None = None) -> Plan:
    """The plan of ``small_config``."""
    return make_plan(small_config(*overrides), model or small_model(), world_size)


def random_route(
    tokens: int, top_k: int, num_experts: int, generator: torch.Generator, holes: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct ids with some -1 slots whose weights are NaN; float32 weights that sum to one."""
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    weights = torch.rand(tokens, top_k, generator=generator).softmax(1)
    if holes and tokens:
        hole = torch.rand(tokens, top_k, generator=generator) < 0.2
        ids = torch.where(hole, -1, ids)
        weights = torch.where(hole, torch.nan, weights)
    return ids.contiguous(), weights.contiguous()
