"""What the plan needs to know of a GPU. One row a device; a config's ``hardware`` overrides it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from epdecode.config import HardwareConfig

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU. Bandwidths in bytes/s, rates in operations/s, dense, per direction."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    hbm_bytes_s: float
    fp8_flops_s: float
    nvlink_bytes_s: float
    source: str


DEVICES = {
    "h100": Device(
        name="h100",
        capability=(9, 0),
        num_sms=132,
        memory_bytes=80 * 10**9,
        hbm_bytes_s=3.35e12,
        fp8_flops_s=1.979e15,
        nvlink_bytes_s=450e9,
        source="NVIDIA H100 SXM5 datasheet",
    ),
    "h200": Device(
        name="h200",
        capability=(9, 0),
        num_sms=132,
        memory_bytes=143771 << 20,
        hbm_bytes_s=4.36e12,
        fp8_flops_s=1.979e15,
        nvlink_bytes_s=450e9,
        source="pure-read stream measured on one H200 (datasheet 4.8 TB/s); rest: H200 datasheet",
    ),
    "h800": Device(
        name="h800",
        capability=(9, 0),
        num_sms=132,
        memory_bytes=80 * 10**9,
        hbm_bytes_s=3.35e12,
        fp8_flops_s=1.979e15,
        nvlink_bytes_s=200e9,
        source="H100 SXM5 datasheet with 400 GB/s NVLink",
    ),
    "b200": Device(
        name="b200",
        capability=(10, 0),
        num_sms=148,
        memory_bytes=180 * 10**9,
        hbm_bytes_s=8.0e12,
        fp8_flops_s=4.5e15,
        nvlink_bytes_s=900e9,
        source="NVIDIA DGX B200 datasheet, per GPU",
    ),
    "gb200": Device(
        name="gb200",
        capability=(10, 0),
        num_sms=152,
        memory_bytes=186 * 10**9,
        hbm_bytes_s=8.0e12,
        fp8_flops_s=5.0e15,
        nvlink_bytes_s=900e9,
        source="NVIDIA GB200 NVL72 datasheet, per GPU",
    ),
}


def match_device(gpu_name: str) -> Device | None:
    """The table row for a CUDA device name such as ``NVIDIA H200``; None when unknown."""
    words = gpu_name.lower().replace("-", " ").split()
    return next((device for name, device in DEVICES.items() if name in words), None)


def resolve_device(hardware: HardwareConfig, found: Device | None) -> Device | None:
    """The device to plan for: the config's, else the one found, with the config's figures."""
    if hardware.device == "cpu":
        return None
    device = found if hardware.device == "auto" else DEVICES[hardware.device]
    if device is None:
        return None
    if hardware.memory_gib != "auto":
        device = replace(device, memory_bytes=int(hardware.memory_gib * GIB))
    if hardware.hbm_tb_s != "auto":
        device = replace(
            device, hbm_bytes_s=hardware.hbm_tb_s * 1e12, source="hardware.hbm_tb_s of the config"
        )
    return device
