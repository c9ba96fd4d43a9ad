"""Checkpoints for tests: made by scripts/make_checkpoint.py, and written tensor by tensor."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures" / "hf"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir())


def maker() -> ModuleType:
    """scripts/make_checkpoint.py as a module."""
    path = ROOT / "scripts" / "make_checkpoint.py"
    spec = importlib.util.spec_from_file_location("make_checkpoint", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(folder: Path, family: str, **fields: object) -> Path:
    """A family's config.json with other fields, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = json.loads((FIXTURES / family / "config.json").read_text())
    path = folder / "config.json"
    path.write_text(json.dumps({**raw, **fields}))
    return path


def small_deepseek(folder: Path, **fields: object) -> dict[str, torch.Tensor]:
    """Eight FP8 experts in layer 3 of DeepSeek-V3's layout, each weight the expert's number, every
    block scale a half, so that a value is number / 2. Nothing is written; see ``save``.
    """
    config_of(folder, "deepseek_v3", **{
        "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "num_hidden_layers": 4, **fields,
    })  # fmt: skip
    hidden, size = 256, int(fields.get("moe_intermediate_size", 128))
    blocks = -(-size // 128)
    root = "model.layers.3."
    tensors = {
        f"{root}post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        f"{root}mlp.gate.weight": torch.zeros(8, hidden, dtype=torch.bfloat16),
        f"{root}mlp.gate.e_score_correction_bias": torch.zeros(8),
    }
    owners = [*(f"experts.{expert}" for expert in range(8)), "shared_experts"]
    for number, owner in enumerate(owners):
        for name, shape, scales in (
            ("gate_proj", (size, hidden), (blocks, 2)),
            ("up_proj", (size, hidden), (blocks, 2)),
            ("down_proj", (hidden, size), (2, blocks)),
        ):
            key = f"{root}mlp.{owner}.{name}.weight"
            tensors[key] = torch.full(shape, float(number)).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = torch.full(scales, 0.5)
    return tensors


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write the tensors as one file."""
    save_file(tensors, folder / "model.safetensors")
    return folder
