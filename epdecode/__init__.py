"""epdecode: the decode-time MoE layer under expert parallelism.

The parts are importable: ``open_runtime(config)`` builds the layers of a config, and
``runtime.moe(layer, x, make_route(...))`` runs one on the caller's own rows.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "load_config": "epdecode.config.load",
    "load_model": "epdecode.config.load",
    "make_plan": "epdecode.plan",
    "make_route": "epdecode.router",
    "open_runtime": "epdecode.session",
}
"""Loaded at first use: the side commands must not import torch."""

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'epdecode' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
