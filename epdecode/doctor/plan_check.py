"""With a config: the plan's checks against the machine at hand."""

from __future__ import annotations

from epdecode.config.load import load_model
from epdecode.doctor.check import Outcome, fail, ok
from epdecode.doctor.machine import Machine
from epdecode.errors import UserError
from epdecode.plan import make_plan
from epdecode.plan.hardware import match_device
from epdecode.routing.load import read_recorded


def check_plan(machine: Machine) -> Outcome:
    """The plan exists for these ranks on these GPUs, and fits into the memory that is free now."""
    if machine.config is None:
        return ok("no config given: --config X adds its checks")
    devices = machine.gpus.devices if machine.needs_gpu else ()
    local_ranks = -(-machine.ranks // machine.nodes)
    per_gpu = -(-local_ranks // len(devices)) if devices else 1
    depth = machine.env.get("NVSHMEM_QP_DEPTH", "")
    try:
        plan = make_plan(
            machine.config,
            load_model(machine.config.model, machine.config_path),
            machine.ranks,
            found=match_device(devices[0].name) if devices else None,
            ranks_per_gpu=per_gpu,
            ranks_per_node=local_ranks,
            recorded=read_recorded(machine.config, machine.config_path),
            qp_depth_set=int(depth) if depth.isdigit() else None,
        )
    except UserError as error:
        return fail(
            str(error), f"a plan for {machine.ranks} rank(s)", "change the config, or --ranks N"
        )
    wanted = plan.memory_bytes * per_gpu
    for gpu in devices:
        if wanted > gpu.memory_free_bytes:
            return fail(
                f"GPU {gpu.index} has {gpu.memory_free_bytes / 2**30:.1f} GiB free of "
                f"{gpu.memory_bytes / 2**30:.1f}",
                f"{wanted / 2**30:.1f} GiB for {per_gpu} rank(s)",
                "end what else uses the GPU (`nvidia-smi`), or lower layers or "
                "transport.max_tokens_per_rank",
            )
    return ok(
        f"{machine.ranks} rank(s), {plan.num_local_experts} experts and "
        f"{plan.memory_bytes / 2**30:.2f} GiB each"
    )
