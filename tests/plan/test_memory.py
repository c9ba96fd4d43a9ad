"""Planned memory against what runs on one H200 were seen to take: above it, by no more than 5%."""

from __future__ import annotations

import pytest

from epdecode.config.load import load_config, load_model
from epdecode.plan import Plan, make_plan
from epdecode.plan.workspaces import chain_partials

MIB = 1 << 20


def plan_of(preset: str, ranks: int, *overrides: str) -> Plan:
    config = load_config(preset, overrides)
    return make_plan(config, load_model(config.model), ranks, ranks_per_gpu=ranks)


SEEN = [
    ("deepseek_v3-h200-ep8_share", 1, "experts.name=deepgemm", 12354.8),
    ("deepseek_v3-h200-ep8_share", 1, "experts.name=triton_gemm", 12208.8),
    ("deepseek_v3-h200-ep8_share", 1, "layers=3", 8206.8),
    ("deepseek_v3-h200-ep8_share", 1, "layers=6", 12360.8),
    ("qwen3_235b-h200-ep8_share", 1, "layers=6", 5544.8),
    ("qwen3_30b-h200-ep8_share", 1, "layers=12", 4666.8),
    ("qwen3_30b-h200-ep8_share", 1, "layers=8", 4362.8),
    ("deepseek_v3-h200-deepep_ht", 2, "routing.kind=uniform", 12418.2),
    ("deepseek_v3-h200-deepep_ht", 2, "routing.kind=stress", 12363.2),
    ("deepseek_v3-h200-deepep_ht", 4, "routing.kind=uniform", 6878.4),
    ("deepseek_v3-h200-deepep_ht", 8, "routing.kind=uniform", 4381.0),
]
"""Preset, ranks on the GPU, override, MiB a rank took (97bd19c, 9d28afd, e088e12)."""


@pytest.mark.parametrize(("preset", "ranks", "override", "seen"), SEEN)
def test_the_plan_is_on_the_safe_side_and_close(
    preset: str, ranks: int, override: str, seen: float
) -> None:
    planned = plan_of(preset, ranks, override).memory_bytes / MIB
    assert seen < planned < 1.05 * seen


@pytest.mark.parametrize(("name", "seen"), [("deepgemm", 102.0), ("tuned", 86.5)])
def test_masked_workspaces_are_those_found(name: str, seen: float) -> None:
    plan = plan_of("deepseek_v3-h200-ep8_share", 1, f"experts.name={name}")
    assert plan.memory["workspaces"] / MIB == pytest.approx(seen, abs=1)


def test_packed_workspaces_are_those_found() -> None:
    for ranks, seen in ((2, 292.8), (4, 198.4)):
        plan = plan_of("deepseek_v3-h200-deepep_ht", ranks)
        assert plan.memory["workspaces"] / MIB == pytest.approx(seen, abs=0.5)


def test_tuned_plans_for_the_backends_it_builds() -> None:
    share = "deepseek_v3-h200-ep8_share"
    ours, tuned = (plan_of(share, 1, f"experts.name={name}") for name in ("triton_gemm", "tuned"))
    assert tuned.experts.backends == ("triton_gemm",)
    assert tuned.experts.shared_backends == ("deepgemm",)
    gate_up = 128 * 4 * 2048
    more = gate_up - chain_partials(128, 2048)
    assert tuned.memory["workspaces"] == ours.memory["workspaces"] + more
