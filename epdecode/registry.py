"""Name -> "module:Class" tables, imported only when chosen: a missing library fails only then."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from epdecode.errors import ConfigError, EnvironmentFault, nearest


def load_member(seam: str, members: Mapping[str, str], name: str) -> Any:
    """The class behind ``name``.

    Raises ConfigError for an unknown name and EnvironmentFault when its library cannot be loaded:
    extension modules fail with ImportError (symbols), OSError (shared objects) and, for deep_gemm
    without a CUDA toolkit, AssertionError.
    """
    if name not in members:
        raise ConfigError(
            f"{seam}.name: got {name!r}, accepted: {', '.join(members)}{nearest(name, members)}"
        )
    module, _, attribute = members[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        said = str(error) or "no message"
        raise EnvironmentFault(
            f"{seam} {name!r} cannot be loaded: {type(error).__name__}: {said}. "
            f"`epdecode doctor` shows what is installed and which set fits."
        ) from error
