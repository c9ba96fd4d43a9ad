"""GPUs as the driver knows them: read without starting CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. ``nvlinks``: links that are up."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    memory_bytes: int
    memory_free_bytes: int
    nvlinks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All GPUs of the node, or why there are none."""

    devices: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA that the driver runs."""
    reason: str = ""


def read() -> Gpus:
    """Ask NVML; a machine without a driver gives no devices and the reason."""
    try:
        import pynvml
    except ImportError as error:
        return Gpus(reason=f"nvidia-ml-py is not installed: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(reason=f"no NVIDIA driver answers: {error}")
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return Gpus(
            devices=tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())),
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            cuda=(cuda // 1000, cuda % 1000 // 10),
        )
    except pynvml.NVMLError as error:
        return Gpus(reason=f"the NVIDIA driver answers with an error: {error}")
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        capability=(int(major), int(minor)),
        memory_bytes=int(memory.total),
        memory_free_bytes=int(memory.free),
        nvlinks=_nvlinks(pynvml, handle),
    )


def _nvlinks(pynvml: Any, handle: Any) -> int:
    """Links in the active state; GPUs without NVLink answer 'not supported'."""
    up = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += int(pynvml.nvmlDeviceGetNvLinkState(handle, link) == 1)
        except pynvml.NVMLError:
            break
    return up


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
