"""Logs: stderr for people (rank 0 INFO, the others WARNING), a DEBUG file per rank."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

FORMAT = "%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"


def to_stderr(rank: int) -> None:
    """Set up at the start of a process; stdout is kept for results."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handler.setFormatter(logging.Formatter(FORMAT.format(rank=rank), "%H:%M:%S"))
    root = logging.getLogger("epdecode")
    root.setLevel(logging.DEBUG)
    root.handlers = [handler]
    root.propagate = False


def to_file(folder: Path, rank: int) -> None:
    """Everything of this rank, in the run folder."""
    handler = logging.FileHandler(folder / f"rank{rank:05d}.log")
    handler.setFormatter(logging.Formatter(FORMAT.format(rank=rank)))
    logging.getLogger("epdecode").addHandler(handler)
