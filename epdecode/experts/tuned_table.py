"""The table of choices tuned on this machine, if there is one."""

from __future__ import annotations

from pathlib import Path

import torch
import triton

from epdecode.plan.expert_choice import Choice, load_table, table_path


def tuned_path(device: torch.device) -> Path:
    """Where the table for this GPU and these versions is or would be."""
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return table_path(torch.cuda.get_device_name(device), versions)


def table_of(device: torch.device) -> dict[str, dict[int, Choice]]:
    """The tuned table, empty without a GPU or before tuning; ConfigError for a broken file."""
    return load_table(tuned_path(device)) if device.type == "cuda" else {}
