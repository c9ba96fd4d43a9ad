"""What this machine has to run experts with: DeepGEMM or not, and the table tuned here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import triton

from epdecode.plan.expert_choice import Choice, load_table, table_path
from epdecode.plan.expert_loads import Kernels


def tuned_path(device: torch.device) -> Path:
    """Where the table for this GPU and these versions is or would be."""
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return table_path(torch.cuda.get_device_name(device), versions)


def table_of(device: torch.device) -> dict[str, dict[int, Choice]]:
    """The tuned table, empty without a GPU or before tuning; ConfigError for a broken file."""
    return load_table(tuned_path(device)) if device.type == "cuda" else {}


def kernels_here(device: torch.device) -> Kernels:
    """For make_plan. DeepGEMM counts as here when it is installed: one that cannot be loaded is an
    error when the plan wants it, never a reason to measure something else."""
    installed = "deep_gemm" in sys.modules or importlib.util.find_spec("deep_gemm") is not None
    return Kernels(table=table_of(device), deepgemm=installed)
