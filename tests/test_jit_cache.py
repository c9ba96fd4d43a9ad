"""The kernel cache of a node: one compile a key, nothing half-written, no lock left behind."""

import logging
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest

from epdecode import jit_cache
from epdecode.errors import EnvironmentFault
from epdecode.jit_cache import (
    cache_key,
    compile_on_one_rank_first,
    compile_once,
    network_file_system,
    use_cache,
)

FORK = multiprocessing.get_context("fork")
KERNEL = b"cubin" * 100_000


def _compile_slowly(folder, seconds, results):
    def build(into):
        results.put(("built", os.getpid()))
        with (into / "kernel").open("wb") as file:
            file.write(KERNEL[:1000])
            file.flush()
            time.sleep(seconds)
            file.write(KERNEL[1000:])

    made = compile_once(folder, "k", build)
    results.put(("loaded", (made / "kernel").read_bytes() == KERNEL))


def start(count, folder, seconds, results):
    processes = [
        FORK.Process(target=_compile_slowly, args=(folder, seconds, results)) for _ in range(count)
    ]
    for process in processes:
        process.start()
    return processes


def drain(results, count):
    got = [results.get(timeout=30) for _ in range(count)]
    built = [value for kind, value in got if kind == "built"]
    return built, [value for kind, value in got if kind == "loaded"]


def test_eight_processes_one_compile(tmp_path):
    results = FORK.Queue()
    processes = start(8, tmp_path, 0.5, results)
    built, loaded = drain(results, 9)
    assert len(built) == 1
    assert loaded == [True] * 8
    for process in processes:
        process.join()


def test_killed_while_compiling_blocks_nobody(tmp_path):
    results = FORK.Queue()
    processes = start(8, tmp_path, 1.0, results)
    _, first = results.get(timeout=30)
    time.sleep(0.2)
    os.kill(first, signal.SIGKILL)
    built, loaded = drain(results, 8)
    assert len(built) == 1
    assert loaded == [True] * 7
    for process in processes:
        process.join()


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(into):
        (into / "half").write_text("x")
        raise RuntimeError("nvcc")

    with pytest.raises(RuntimeError, match="nvcc"):
        compile_once(tmp_path, "k", build)
    assert [path.name for path in tmp_path.iterdir()] == ["k.lock"]


def test_old_trash_is_removed(tmp_path):
    old, young = tmp_path / ".k.1.part", tmp_path / ".k.2.part"
    for path in (old, young):
        path.mkdir()
    os.utime(old, (1, 1))
    compile_once(tmp_path, "k", lambda into: None)
    assert not old.exists()
    assert young.exists()


def _first_alone(folder, rank, events):
    def compile_all():
        events.put((rank, "begin", time.monotonic()))
        time.sleep(0.3)
        events.put((rank, "end", time.monotonic()))

    compile_on_one_rank_first(folder, "shapes", compile_all)


def test_one_rank_compiles_first_then_all_others(tmp_path):
    events = FORK.Queue()
    processes = [
        FORK.Process(target=_first_alone, args=(tmp_path, rank, events)) for rank in range(4)
    ]
    for process in processes:
        process.start()
    got = sorted((events.get(timeout=30) for _ in range(8)), key=lambda event: event[2])
    assert got[0][0] == got[1][0]
    assert [event[1] for event in got[:2]] == ["begin", "end"]
    assert {event[0] for event in got} == {0, 1, 2, 3}
    for process in processes:
        process.join()


def test_key_depends_on_every_part():
    parts = {"arch": "sm_90", "triton": "3.6.0"}
    keys = {cache_key({**parts, name: "other"}) for name in parts} | {cache_key(parts)}
    assert len(keys) == 3
    assert cache_key(dict(reversed(parts.items()))) == cache_key(parts)


def test_variables_point_to_the_cache_and_are_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    env = {"EPDECODE_CACHE_DIR": str(tmp_path), "DG_JIT_CACHE_DIR": str(tmp_path / "mine")}
    folder = use_cache({"arch": "sm_90"}, env)
    assert folder.parent == tmp_path
    assert env["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert env["DG_JIT_CACHE_DIR"] == str(tmp_path / "mine")
    assert str(folder / "triton") in caplog.text
    assert "WARNING" not in caplog.text


def on_nfs(monkeypatch, mountpoint):
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(mountpoint), fstype="nfs4"),
    ]
    monkeypatch.setattr(jit_cache.psutil, "disk_partitions", lambda all: mounts)


def test_network_file_system(monkeypatch, tmp_path):
    on_nfs(monkeypatch, tmp_path / "home")
    assert network_file_system(tmp_path / "home" / "a") == "nfs4"
    assert network_file_system(tmp_path / "homework") is None


def test_default_is_local_even_when_home_is_not(monkeypatch, tmp_path):
    (tmp_path / "home").mkdir()
    on_nfs(monkeypatch, tmp_path / "home")
    monkeypatch.setattr(jit_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = use_cache({}, {"HOME": str(tmp_path / "home")})
    assert folder.parent == tmp_path / f"epdecode-{os.getuid()}"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    local = use_cache({}, {"HOME": str(tmp_path / "local")})
    assert local.parent == tmp_path / "local" / ".cache" / "epdecode"


def test_a_chosen_network_cache_earns_a_warning(monkeypatch, tmp_path, caplog):
    on_nfs(monkeypatch, tmp_path)
    use_cache({}, {"EPDECODE_CACHE_DIR": str(tmp_path / "cache")})
    assert "is on nfs4" in caplog.text


def test_unwritable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="EPDECODE_CACHE_DIR"):
        use_cache({}, {"EPDECODE_CACHE_DIR": str(tmp_path / "file" / "x")})
