"""Every check, in the report's order. Add one by listing it."""

from __future__ import annotations

from collections.abc import Callable

from epdecode.doctor import gpu, host, libraries, network, plan_check
from epdecode.doctor.check import Outcome
from epdecode.doctor.machine import Machine

CHECKS: dict[str, Callable[[Machine], Outcome]] = {
    "python": libraries.check_python,
    "torch": libraries.check_torch,
    "triton": libraries.check_triton,
    "deep_ep": libraries.check_deep_ep,
    "deep_gemm": libraries.check_deep_gemm,
    "wheel_set": libraries.check_wheel_set,
    "nvshmem": libraries.check_nvshmem,
    "gpu": gpu.check_gpu,
    "capability": gpu.check_capability,
    "nvlink": gpu.check_nvlink,
    "compiler": gpu.check_compiler,
    "jit_cache": host.check_caches,
    "disk": host.check_disk,
    "shm": host.check_shm,
    "memlock": host.check_memlock,
    "launch": host.check_launch,
    "interfaces": network.check_interfaces,
    "port": network.check_port,
    "rdma": network.check_rdma,
    "gpu_direct": network.check_gpu_direct,
    "ibgda": network.check_ibgda,
    "gdrcopy": network.check_gdrcopy,
    "plan": plan_check.check_plan,
}
