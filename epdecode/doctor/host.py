"""The node itself: disk, caches, shared memory, limits, the launch environment."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

from epdecode.doctor.check import Outcome, fail, ok, warn
from epdecode.doctor.machine import Machine
from epdecode.errors import EnvironmentFault
from epdecode.launch.env import EXAMPLE, read_launch

MIB, GIB = 1 << 20, 1 << 30
RESULT_BYTES = 64 * MIB
"""A run folder with samples and a trace of every rank stays below this."""

CACHES = {"DG_JIT_CACHE_DIR": ".deep_gemm", "TRITON_CACHE_DIR": ".triton/cache"}
"""Variable -> default below the home directory."""

NETWORK_FILE_SYSTEMS = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs", "wekafs",
    "fuse.sshfs", "fuse.gcsfuse", "fuse.s3fs", "fuse.juicefs", "panfs", "glusterfs",
)  # fmt: skip


def check_launch(machine: Machine) -> Outcome:
    """The launcher's variables are all there or all absent."""
    try:
        launch = read_launch(machine.env)
    except EnvironmentFault as error:
        return fail(str(error), "all of torchrun's variables, or none", EXAMPLE)
    if launch.world_size == 1:
        return ok("no launcher: a world of one")
    return ok(f"rank {launch.rank} of {launch.world_size}, master {launch.master_addr}")


def check_disk(machine: Machine) -> Outcome:
    """Room for the run folder, and it can be written."""
    folder = _existing(machine.runs)
    want = f"{RESULT_BYTES // MIB} MiB that can be written, for results"
    fix = "free space, or name another folder: --out DIR"
    free = shutil.disk_usage(folder).free
    if free < RESULT_BYTES:
        return fail(f"{free / MIB:.1f} MiB free at {folder}", want, fix)
    if problem := _cannot_write(folder):
        return fail(f"{folder}: {problem}", want, fix)
    if free < GIB:
        return warn(f"{free / MIB:.0f} MiB free at {folder}", "1 GiB for traces and logs", fix)
    return ok(f"{free / GIB:.0f} GiB free at {folder}")


def check_caches(machine: Machine) -> Outcome:
    """Compiled kernels go to folders that can be written and that no other node shares."""
    if not machine.needs_gpu:
        return ok("not needed: nothing is compiled without a GPU")
    home = Path(machine.env.get("HOME") or "/")
    shared = []
    for variable, default in CACHES.items():
        folder = Path(machine.env.get(variable) or home / default)
        existing = _existing(folder)
        if problem := _cannot_write(existing):
            return fail(
                f"{variable}: {folder}: {problem}",
                "a folder that can be written",
                f"export {variable}=/tmp/$USER/{variable.lower()}",
            )
        if (kind := file_system(machine, existing)) in NETWORK_FILE_SYSTEMS:
            shared.append(f"{variable}: {folder} is on {kind}")
    if shared:
        return warn(
            "; ".join(shared),
            "node-local folders: on a network file system ranks load half-written kernels",
            "export "
            + " ".join(f"{variable}=/tmp/$USER/{variable.lower()}" for variable in CACHES),
        )
    return ok(", ".join(machine.env.get(v) or f"~/{default}" for v, default in CACHES.items()))


def file_system(machine: Machine, path: Path) -> str:
    """Type of the file system that holds ``path``: the longest mount point that is a parent."""
    best, kind = "", "unknown"
    for line in (machine.text("proc/self/mounts") or "").splitlines():
        _, mount, name, *_ = line.split()
        mount = mount.replace("\\040", " ")
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def check_shm(machine: Machine) -> Outcome:
    """NCCL and NVSHMEM put their host side in /dev/shm; containers give 64 MiB by default."""
    folder = machine.root / "dev/shm"
    want, fix = (
        "1 GiB",
        "docker run --shm-size=16g; Kubernetes: an emptyDir of medium Memory",
    )
    if not folder.is_dir():
        return warn("no /dev/shm", want, fix)
    usage = shutil.disk_usage(folder)
    if usage.free < GIB:
        return warn(f"{usage.free / MIB:.0f} MiB free of {usage.total / MIB:.0f}", want, fix)
    return ok(f"{usage.free / GIB:.1f} GiB free")


def check_memlock(machine: Machine) -> Outcome:
    """RDMA pins buffers: several GiB a rank."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / MIB:.0f} MiB"
    if machine.nodes > 1 and machine.needs_gpu and soft != resource.RLIM_INFINITY:
        return fail(
            f"memlock limit {shown}",
            "unlimited: RDMA cannot register its buffers otherwise",
            "ulimit -l unlimited; docker --ulimit memlock=-1; Slurm: PropagateResourceLimits or "
            "LimitMEMLOCK=infinity for slurmd",
        )
    return ok(f"memlock limit {shown}")


def _existing(folder: Path) -> Path:
    """``folder`` or its nearest parent that exists."""
    for candidate in (folder, *folder.absolute().parents):
        if os.path.lexists(candidate):
            return candidate
    return Path("/")


def _cannot_write(folder: Path) -> str:
    """Why a file cannot be made in ``folder``; '' when it can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".epdecode-doctor-") as file:
            file.write(b"x" * MIB)
            file.flush()
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"
    return ""
