"""Compiled kernels: one cache a node, keyed by what they depend on, filled by one rank at a time.

Several ranks that compile the same kernel at once waste minutes and, with libraries that do not
rename atomically, read each other's half-written files; on a network file system even a renamed
file can stay invisible for a minute.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from epdecode.doctor.host import NETWORK_FILE_SYSTEMS
from epdecode.errors import EnvironmentFault

log = logging.getLogger(__name__)

VARIABLES = {"TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm"}
"""Where the libraries look -> folder in ours."""
TRASH_S = 3600
"""Unfinished work older than this belongs to nobody any more."""


def use_cache(parts: Mapping[str, str], env: MutableMapping[str, str]) -> Path:
    """Point the libraries to this node's cache for ``parts`` (architecture, versions).

    Call before they are imported. Variables that are set already are left alone, with a warning
    when they lead to a network file system. Raises EnvironmentFault when it cannot be written.
    """
    folder = _root(env) / cache_key(parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"kernel cache {folder} cannot be made: {error.strerror}; set EPDECODE_CACHE_DIR to a "
            f"folder on a local disk"
        ) from error
    for variable, name in VARIABLES.items():
        path = env.setdefault(variable, str(folder / name))
        kind = network_file_system(Path(path))
        if kind:
            log.warning(
                "%s=%s is on %s: ranks may load half-written kernels; use a local disk",
                variable,
                path,
                kind,
            )
        log.info("%s=%s", variable, path)
    return folder


def cache_key(parts: Mapping[str, str]) -> str:
    """16 hexadecimal digits of what compiled code depends on."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(parts.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compile_on_one_rank_first(folder: Path, key: str, compile_all: Callable[[], None]) -> None:
    """Run ``compile_all`` on every rank of the node, on the first of them alone.

    The first fills the libraries' cache, the others then find their kernels there.
    ``compile_all`` must not wait for other ranks.
    """
    compiled = []

    def fill(unused: Path) -> None:
        compile_all()
        compiled.append(True)

    compile_once(folder, f"{key}.done", fill)
    if not compiled:
        compile_all()


def compile_once(folder: Path, key: str, build: Callable[[Path], None]) -> Path:
    """``folder/key``, made by exactly one process of this node and whole when it appears.

    build(into) writes its files into a folder of its own, which is renamed when it returns. The
    lock goes with its holder: one that is killed blocks nobody, and the next one builds.
    """
    made = folder / key
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{key}.lock"):
        if not made.exists():
            _remove_trash(folder)
            into = folder / f".{key}.{os.getpid()}.{secrets.token_hex(4)}.part"
            into.mkdir()
            try:
                build(into)
                into.rename(made)
            except BaseException:
                shutil.rmtree(into, ignore_errors=True)
                raise
    return made


def network_file_system(path: Path) -> str | None:
    """Type of the network file system that holds ``path``, None for a local one."""
    resolved = str(path.resolve())
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if (resolved + "/").startswith(mount.mountpoint.rstrip("/") + "/")
    ]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def _root(env: Mapping[str, str]) -> Path:
    """EPDECODE_CACHE_DIR, else the user's cache folder, else (on a network disk) one in /tmp."""
    if env.get("EPDECODE_CACHE_DIR"):
        return Path(env["EPDECODE_CACHE_DIR"])
    home = Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "/") / ".cache") / "epdecode"
    if not network_file_system(home):
        return home
    return _own_folder(Path(tempfile.gettempdir()) / f"epdecode-{os.getuid()}")


def _own_folder(path: Path) -> Path:
    """A folder in a place that everyone may write: ours alone, or refused."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
        raise EnvironmentFault(f"kernel cache {path} belongs to another user: EPDECODE_CACHE_DIR")
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_trash(folder: Path) -> None:
    for path in folder.glob(".*.part"):
        if time.time() - path.stat().st_mtime > TRASH_S:
            shutil.rmtree(path, ignore_errors=True)
