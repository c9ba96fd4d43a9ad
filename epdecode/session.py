"""From a config to a joined world with a plan that fits it: what every entry point does first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from epdecode import experts, transport
from epdecode import world as worlds
from epdecode.build import Runtime, build
from epdecode.config import Config
from epdecode.config.load import digest, load_config, load_model
from epdecode.errors import EnvironmentFault
from epdecode.experts.tuned_table import kernels_here
from epdecode.jit_cache import use_cache
from epdecode.launch.env import Launch, read_launch
from epdecode.models import ModelShape
from epdecode.plan import Plan, make_plan, to_json
from epdecode.plan.hardware import Device, match_device
from epdecode.provenance import loaded_versions
from epdecode.routing.load import read_recorded
from epdecode.sources import Sources, open_sources


@dataclass(frozen=True, slots=True)
class Setup:
    """What is known before any rank talks to another."""

    config: Config
    model: ModelShape
    digest: str
    launch: Launch
    device: torch.device
    plan: Plan
    cache: Path | None
    """This node's folder of compiled kernels; None where nothing is compiled."""
    sources: Sources
    """The checkpoint and the recordings that the config names."""


def prepare(config_path: str | Path | None, overrides: Sequence[str] = ()) -> Setup:
    """Read the launch and the config, choose the device, make the plan.

    Raises UserError for anything wrong, before any process group or device memory exists.
    """
    launch = read_launch(os.environ)
    config = load_config(config_path, overrides)
    model = load_model(config.model, config_path)
    device = worlds.choose_device(launch.local_rank, cpu=_wants_cpu(config))
    if config.transport.name.startswith("deepep") and device.type == "cpu":
        raise EnvironmentFault(
            f"transport.name: {config.transport.name} needs a CUDA GPU and torch "
            f"{torch.__version__} sees none; configs/cpu-tiny.yaml runs without one"
        )
    recorded = read_recorded(config, config_path)
    plan = make_plan(
        config,
        model,
        launch.world_size,
        found=_found_device(device),
        ranks_per_gpu=_ranks_per_gpu(launch, device),
        ranks_per_node=launch.local_world_size,
        recorded=recorded,
        qp_depth_set=_qp_depth(os.environ),
        kernels=kernels_here(device),
    )
    on_gpu = device.type == "cuda"
    cache = use_cache(_compiled_for(device), os.environ) if on_gpu else None
    transport.load_transport(plan)
    experts.load_experts(plan)
    sources = open_sources(config, model, plan, recorded, config_path)
    return Setup(config, model, digest(config, model), launch, device, plan, cache, sources)


def meet(setup: Setup) -> Store:
    """Open the launch's store and agree on config, plan and versions, before any collective."""
    timeout = setup.config.limits.join_s
    store = worlds.open_store(setup.launch, timeout)
    facts = {
        # The first difference is reported: keys that a user wrote before what follows from them.
        "config": flatten(
            {
                **asdict(setup.config),
                "plan": _comparable(setup.plan),
                "recorded_routing": setup.sources.digest,
                "digest": setup.digest,
            }
        ),
        "versions": {name: version or "absent" for name, version in loaded_versions().items()},
    }
    worlds.agree(store, setup.launch, facts, timeout)
    return store


def join(setup: Setup, store: Store) -> worlds.World:
    """The process group over a store that all ranks have met at."""
    return worlds.join(setup.launch, store, setup.device, setup.config.limits.join_s)


@contextmanager
def open_runtime(
    config_path: str | Path | None = None, overrides: Sequence[str] = ()
) -> Iterator[Runtime]:
    """The layers of a config, built and ready on this rank; closed and left at the end."""
    setup = prepare(config_path, overrides)
    world = join(setup, meet(setup))
    try:
        runtime = build(setup.config, setup.plan, world, setup.sources)
        try:
            yield runtime
        finally:
            runtime.close()
    finally:
        worlds.leave()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> text of every leaf."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = str(value)
    return flat


def _comparable(plan: Plan) -> dict[str, Any]:
    """The plan without what may differ from host to host."""
    document = to_json(plan)
    document.pop("ranks_per_gpu")
    return document


def _wants_cpu(config: Config) -> bool:
    return config.hardware.device == "cpu"


def _found_device(device: torch.device) -> Device | None:
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in (9, 10):
        raise EnvironmentFault(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; accepted: 9.x (Hopper) and 10.x (Blackwell), whose "
            f"FP8 and TMA the kernels use; hardware.device=cpu runs without the GPU"
        )
    return match_device(torch.cuda.get_device_name(device))


def _ranks_per_gpu(launch: Launch, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return -(-launch.local_world_size // torch.cuda.device_count())


def _compiled_for(device: torch.device) -> dict[str, str]:
    """What compiled kernels depend on."""
    return {
        "capability": str(torch.cuda.get_device_capability(device)),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
    }


def _qp_depth(env: Mapping[str, str]) -> int | None:
    text = env.get("NVSHMEM_QP_DEPTH", "")
    if not text:
        return None
    if not text.isdigit():
        raise EnvironmentFault(f"NVSHMEM_QP_DEPTH={text!r}: accepted: a positive integer")
    return int(text)
