"""What the checks look at: this machine, the environment, and what the config needs of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from epdecode.config import Config
from epdecode.doctor import nvml
from epdecode.errors import EnvironmentFault
from epdecode.launch.env import read_launch

GPU_TRANSPORTS = ("deepep_ll", "deepep_ht")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The subject. ``root`` is where /proc, /sys and /dev are looked for."""

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    python: str = sys.executable
    runs: Path = Path("runs")
    """The folder that results go to."""
    config: Config | None = None
    config_path: str | None = None
    ranks: int = 1
    nodes: int = 1
    gpus: nvml.Gpus = field(default_factory=nvml.read)

    @property
    def needs_gpu(self) -> bool:
        """The config asks for one; without a config, there is one."""
        if self.config is None:
            return bool(self.gpus.devices)
        return self.config.transport.name in GPU_TRANSPORTS

    @property
    def needs_deep_gemm(self) -> bool:
        """The experts member is, or becomes, DeepGEMM."""
        if self.config is None:
            return self.needs_gpu
        return self.needs_gpu and self.config.experts.name in ("auto", "deepgemm")

    def text(self, path: str) -> str | None:
        """A file below ``root``; None when it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return None


def nodes_of(env: Mapping[str, str]) -> int:
    """Nodes of the launch or of the Slurm allocation this process is in; 1 when in neither."""
    try:
        launch = read_launch(env)
    except EnvironmentFault:
        return 1
    if launch.world_size > 1:
        return -(-launch.world_size // launch.local_world_size)
    count = env.get("SLURM_JOB_NUM_NODES", "1")
    return int(count) if count.isdigit() else 1
