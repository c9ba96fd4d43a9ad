"""Machines for the doctor's tests: an H200 node that never was, and modules that do not load."""

from __future__ import annotations

import os
from pathlib import Path

from epdecode.config.load import load_config
from epdecode.doctor.machine import Machine
from epdecode.doctor.nvml import Gpu, Gpus

H200 = "deepseek_v3-h200-deepep_ll"


def one_gpu(index: int = 0, **changes) -> Gpu:
    values = {
        "index": index, "name": "NVIDIA H200", "uuid": f"GPU-{index}", "capability": (9, 0),
        "memory_bytes": 143771 << 20, "memory_free_bytes": 143000 << 20, "nvlinks": 18,
    }  # fmt: skip
    return Gpu(**{**values, **changes})


def gpus(*devices: Gpu, **changes) -> Gpus:
    return Gpus(devices=devices or (one_gpu(),), driver="580.1", cuda=(13, 0), **changes)


def machine(tmp_path: Path | None = None, **changes) -> Machine:
    """An H200 node with the H200 preset, below ``tmp_path`` when given."""
    values = {"config": load_config(H200), "config_path": None, "gpus": gpus(), "env": {}}
    if tmp_path is not None:
        values["root"] = tmp_path
    return Machine(**{**values, **changes})


def stub(tmp_path: Path, **modules: str) -> dict[str, str]:
    """An environment whose Python finds these modules first."""
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    return {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}


TORCH = '__version__ = "2.11.0+cu130"\nclass version:\n    cuda = "13.0"\nclass cuda:\n' \
    "    device_count = staticmethod(lambda: 1)\n    class nccl:\n" \
    "        version = staticmethod(lambda: (2, 28, 9))\n"  # fmt: skip
