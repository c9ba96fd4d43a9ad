"""What crosses nodes: interfaces, ports, RDMA devices, GPU direct, GDRCopy."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from epdecode.doctor.check import Outcome, fail, ok, warn
from epdecode.doctor.machine import Machine
from epdecode.errors import EnvironmentFault, nearest
from epdecode.launch.env import Launch, check_network

ONE_NODE = "not needed on one node"
IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")
DEFAULT_PORT = 29500


def check_interfaces(machine: Machine) -> Outcome:
    """The named interfaces exist; on several nodes the host name is no loopback address."""
    interfaces = psutil.net_if_addrs()
    listed = ", ".join(sorted(interfaces))
    for variable in IFNAMES:
        # NCCL's syntax: a prefix, '=' for an exact name, '^' for all but these.
        names = machine.env.get(variable, "").lstrip("=")
        if not names or names.startswith("^"):
            continue
        for name in names.split(","):
            if not any(have.startswith(name) for have in interfaces):
                return fail(
                    f"{variable}={name}: no such interface{nearest(name, interfaces)}",
                    f"one of: {listed}",
                    f"export {variable}=<one of them, on the network that the nodes share>",
                )
    try:
        check_network(_as_launch(machine), machine.env)
    except EnvironmentFault as error:
        return fail(
            str(error),
            "an interface and an address that the other nodes reach",
            f"export GLOO_SOCKET_IFNAME=<one of: {listed}>",
        )
    return ok(f"{socket.gethostname()}: {listed}")


def _as_launch(machine: Machine) -> Launch:
    master = machine.env.get("MASTER_ADDR") or socket.gethostname()
    return Launch(world_size=machine.nodes, local_world_size=1, master_addr=master)


def check_port(machine: Machine) -> Outcome:
    """The rendezvous port is free here (only when no launcher is holding it for us already)."""
    if "TORCHELASTIC_RUN_ID" in machine.env:
        return ok("held by torchrun, which started this")
    text = machine.env.get("MASTER_PORT", str(DEFAULT_PORT))
    if not text.isdigit() or not 0 < int(text) < 65536:
        return fail(f"MASTER_PORT={text}", "a port from 1 to 65535", "export MASTER_PORT=29500")
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(text)))
        except OSError as error:
            return fail(
                f"port {text}: {error.strerror}",
                "a free port for the rendezvous",
                "torchrun --standalone takes any free port; across nodes set another MASTER_PORT; "
                f"`ss -ltnp 'sport = :{text}'` names the holder",
            )
    return ok(f"port {text} is free")


def check_rdma(machine: Machine) -> Outcome:
    """RDMA devices with an active port. DeepEP's IBGDA path drives mlx5 devices only."""
    devices = rdma_devices(machine.root)
    if machine.nodes == 1 or not machine.needs_gpu:
        return ok(f"{ONE_NODE}: {_shown(devices)}")
    active = {name: link for name, (state, link) in devices.items() if "ACTIVE" in state}
    if not active:
        return fail(
            _shown(devices),
            "an InfiniBand or RoCE port in state ACTIVE",
            "`ibstat`; docker --device=/dev/infiniband; Kubernetes: request the RDMA resource",
        )
    if not any(name.startswith("mlx5") for name in active):
        return fail(
            _shown(devices),
            "an mlx5 device: DeepEP's GPU-driven path knows no other",
            "use ConnectX NICs; renamed ones need NVSHMEM_HCA_PREFIX",
        )
    if not (machine.root / "dev/infiniband").is_dir():
        return fail("no /dev/infiniband", "its device files", "docker --device=/dev/infiniband")
    return ok(_shown(devices))


def rdma_devices(root: Path) -> dict[str, tuple[str, str]]:
    """Device -> (state, link layer) of its first port, from sysfs."""
    found = {}
    for device in sorted((root / "sys/class/infiniband").glob("*")):
        port = device / "ports/1"
        try:
            state, link = ((port / name).read_text().strip() for name in ("state", "link_layer"))
        except OSError:
            state, link = "unreadable", ""
        found[device.name] = (state, link)
    return found


def _shown(devices: dict[str, tuple[str, str]]) -> str:
    return ", ".join(f"{n} {s} {li}".strip() for n, (s, li) in devices.items()) or "no RDMA device"


def check_gpu_direct(machine: Machine) -> Outcome:
    """The NIC reaches GPU memory: nvidia_peermem, or dmabuf of the open kernel modules."""
    if machine.nodes == 1 or not machine.needs_gpu:
        return ok(ONE_NODE)
    if (machine.root / "sys/module/nvidia_peermem").is_dir():
        return ok("nvidia_peermem is loaded")
    version = machine.text("proc/driver/nvidia/version") or ""
    if "Open Kernel Module" in version:
        return ok("no nvidia_peermem; the open kernel modules offer dmabuf")
    return fail(
        "neither nvidia_peermem nor the open kernel modules",
        "one of them: NVSHMEM cannot register GPU memory with the NIC otherwise",
        "modprobe nvidia_peermem on the host",
    )


def check_ibgda(machine: Machine) -> Outcome:
    """The GPU rings the NIC's doorbell: two driver options, or GDRCopy with the CPU handler."""
    if machine.nodes == 1 or not machine.needs_gpu:
        return ok(ONE_NODE)
    params = machine.text("proc/driver/nvidia/params") or ""
    gdrcopy = (machine.root / "dev/gdrdrv").exists()
    if "EnableStreamMemOPs: 1" in params and "PeerMappingOverride=1" in params:
        return ok("EnableStreamMemOPs and PeerMappingOverride are on")
    if gdrcopy and machine.env.get("NVSHMEM_IBGDA_NIC_HANDLER") in ("cpu", "auto", None):
        return ok("GDRCopy is loaded: IBGDA with the CPU handler")
    return fail(
        "driver options EnableStreamMemOPs / PeerMappingOverride are off, and no /dev/gdrdrv",
        "GPU-driven RDMA (IBGDA)",
        "options nvidia NVreg_EnableStreamMemOPs=1 "
        'NVreg_RegistryDwords="PeerMappingOverride=1;" '
        "in /etc/modprobe.d and a reboot, or load gdrdrv and set NVSHMEM_IBGDA_NIC_HANDLER=cpu",
    )


def check_gdrcopy(machine: Machine) -> Outcome:
    """Optional: small host writes to GPU memory without a copy engine."""
    if machine.nodes == 1 or not machine.needs_gpu:
        return ok(ONE_NODE)
    if (machine.root / "dev/gdrdrv").exists():
        return ok("/dev/gdrdrv is there")
    return warn("no /dev/gdrdrv", "GDRCopy, for NVSHMEM's proxy", "install gdrcopy and load gdrdrv")
