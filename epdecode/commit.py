"""Which source is running."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit() -> str | None:
    """Commit of the source tree, '+dirty' when files differ; None outside one.

    EPDECODE_COMMIT names it where the tree travelled without its history.
    """
    tree = Path(__file__).resolve().parent.parent
    if given := os.environ.get("EPDECODE_COMMIT"):
        return given
    if not (tree / ".git").exists():
        return None
    head = _git(tree, "rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    return head + ("+dirty" if _git(tree, "status", "--porcelain", "-uno") else "")


def _git(tree: Path, *arguments: str) -> str:
    """Output of git; '' when it fails."""
    try:
        child = subprocess.run(
            ["git", "-C", str(tree), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return child.stdout.strip() if child.returncode == 0 else ""
