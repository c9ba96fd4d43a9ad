"""The doctor on host, network and plan; the frame around the checks; the command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epdecode.cli import app
from epdecode.doctor import host, network, plan_check
from epdecode.doctor.check import Verdict, ok, run_checks
from epdecode.doctor.machine import Machine, nodes_of
from epdecode.doctor.table import CHECKS
from tests.machines import H200, gpus, machine, one_gpu

# Host.


@pytest.mark.parametrize("variable", ["DG_JIT_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_cache_that_cannot_be_written(tmp_path, variable) -> None:
    (tmp_path / "file").write_text("")
    env = {"HOME": str(tmp_path), variable: str(tmp_path / "file" / "cache")}
    outcome = host.check_caches(machine(env=env))
    assert outcome.verdict is Verdict.FAIL
    assert variable in outcome.saw
    assert f"export {variable}=" in outcome.fix


def test_cache_on_a_network_file_system(tmp_path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    home = tmp_path / "home dir"
    home.mkdir()
    mount = str(home).replace(" ", "\\040")
    (tmp_path / "proc/self/mounts").write_text(
        f"/dev/vda / ext4 rw 0 0\nserver:/home {mount} nfs4 rw 0 0\n"
    )
    here = {"HOME": str(home)}
    outcome = host.check_caches(machine(tmp_path, env=here))
    assert outcome.verdict is Verdict.WARN
    assert "is on nfs4" in outcome.saw
    for variable in host.CACHES:
        here = {**here, variable: str(tmp_path / variable)}
    assert host.check_caches(machine(tmp_path, env=here)).verdict is Verdict.OK


def test_disk_full(tmp_path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"mounts are not allowed here: {mounted.stderr.decode().strip()}")
    try:
        outcome = host.check_disk(machine(runs=tmp_path / "runs"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert outcome.verdict is Verdict.FAIL
    assert "0.2 MiB free" in outcome.saw
    assert "--out" in outcome.fix


def test_disk_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "runs").write_text("a file")
    outcome = host.check_disk(machine(runs=tmp_path / "runs"))
    assert (outcome.verdict, "cannot be written" in outcome.saw) == (Verdict.FAIL, True)


def test_shm_absent(tmp_path) -> None:
    assert host.check_shm(machine(tmp_path)).verdict is Verdict.WARN


def test_launch_variables_of_another_launch() -> None:
    outcome = host.check_launch(machine(env={"RANK": "0"}))
    assert outcome.verdict is Verdict.FAIL
    assert "WORLD_SIZE" in outcome.saw
    assert "torchrun" in outcome.fix


# Network.


def test_port_in_use() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        outcome = network.check_port(machine(env={"MASTER_PORT": str(port)}))
        assert outcome.verdict is Verdict.FAIL
        assert f"port {port}" in outcome.saw
    assert network.check_port(machine(env={"MASTER_PORT": str(port)})).verdict is Verdict.OK


@pytest.mark.parametrize("variable", network.IFNAMES)
def test_interface_that_is_not_there(variable) -> None:
    outcome = network.check_interfaces(machine(env={variable: "nope0"}))
    assert outcome.verdict is Verdict.FAIL
    assert f"{variable}=nope0" in outcome.saw
    assert "lo" in outcome.want


@pytest.mark.parametrize("value", ["^docker0,lo", "=lo", "lo"])
def test_interface_syntax_of_nccl(value) -> None:
    here = machine(env={"NCCL_SOCKET_IFNAME": value})
    assert network.check_interfaces(here).verdict is Verdict.OK


def test_loopback_master_of_two_nodes() -> None:
    here = machine(nodes=2, env={"MASTER_ADDR": "127.0.0.1"})
    outcome = network.check_interfaces(here)
    assert (outcome.verdict, "loopback" in outcome.saw) == (Verdict.FAIL, True)


def rdma(root: Path, **devices: str) -> Path:
    for name, state in devices.items():
        port = root / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text("InfiniBand\n")
    (root / "dev/infiniband").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("devices", "verdict"),
    [
        ({"mlx5_0": "4: ACTIVE"}, Verdict.OK),
        ({"mlx5_0": "1: DOWN"}, Verdict.FAIL),
        ({"bnxt_re0": "4: ACTIVE"}, Verdict.FAIL),
        ({}, Verdict.FAIL),
    ],
)
def test_rdma_of_two_nodes(tmp_path, devices, verdict) -> None:
    here = machine(rdma(tmp_path, **devices), nodes=2)
    assert network.check_rdma(here).verdict is verdict
    assert network.check_rdma(replace(here, nodes=1)).verdict is Verdict.OK


def test_rdma_without_device_files(tmp_path) -> None:
    (rdma(tmp_path, mlx5_0="4: ACTIVE") / "dev/infiniband").rmdir()
    outcome = network.check_rdma(machine(tmp_path, nodes=2))
    assert (outcome.verdict, outcome.saw) == (Verdict.FAIL, "no /dev/infiniband")


@pytest.mark.parametrize("check", [network.check_gpu_direct, network.check_ibgda])
def test_several_nodes_need_gpu_driven_rdma_and_one_does_not(tmp_path, check) -> None:
    assert check(machine(tmp_path, nodes=2)).verdict is Verdict.FAIL
    assert check(machine(tmp_path)).verdict is Verdict.OK


def test_peermem_or_dmabuf(tmp_path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM: Open Kernel Module 580.1")
    assert network.check_gpu_direct(machine(tmp_path, nodes=2)).verdict is Verdict.OK


def test_ibgda_by_driver_options(tmp_path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/params").write_text(
        'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n'
    )
    assert network.check_ibgda(machine(tmp_path, nodes=2)).verdict is Verdict.OK


# The plan against the machine.


def test_plan_that_fits() -> None:
    assert plan_check.check_plan(machine(ranks=1)).verdict is Verdict.OK


def test_plan_of_too_many_ranks() -> None:
    outcome = plan_check.check_plan(machine(ranks=3))
    assert outcome.verdict is Verdict.FAIL
    assert "256 experts do not divide over 3 ranks" in outcome.saw


def test_plan_on_a_gpu_that_is_in_use() -> None:
    busy = gpus(one_gpu(memory_free_bytes=10 << 30))
    outcome = plan_check.check_plan(machine(ranks=1, gpus=busy))
    assert outcome.verdict is Verdict.FAIL
    assert "GPU 0 has 10.0 GiB free" in outcome.saw


def test_plan_with_a_short_queue_in_the_environment() -> None:
    outcome = plan_check.check_plan(machine(ranks=1, env={"NVSHMEM_QP_DEPTH": "64"}))
    assert (outcome.verdict, "NVSHMEM_QP_DEPTH" in outcome.saw) == (Verdict.FAIL, True)


# The frame around them.


def test_checks_fail_alone_and_are_bounded() -> None:
    def broken(here: Machine):
        raise OSError("disk on fire")

    def hanging(here: Machine):
        time.sleep(30)

    table = {"hanging": hanging, "broken": broken, "good": lambda here: ok("fine")}
    start = time.monotonic()
    checks = run_checks(table, machine(), limit_s=0.5)
    assert time.monotonic() - start < 5
    assert [check.id for check in checks] == list(table)
    assert [check.outcome.verdict for check in checks] == [Verdict.FAIL, Verdict.FAIL, Verdict.OK]
    assert "no answer in 0.5 s" in checks[0].outcome.saw
    assert "disk on fire" in checks[1].outcome.saw


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        ({}, 1),
        ({"SLURM_JOB_NUM_NODES": "3"}, 3),
        ({"RANK": "0"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8",
          "MASTER_ADDR": "n1", "MASTER_PORT": "1"}, 2),
    ],
)  # fmt: skip
def test_nodes_of_the_launch(env, nodes) -> None:
    assert nodes_of(env) == nodes


def test_command_on_a_cpu_machine(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    start = time.monotonic()
    result = CliRunner().invoke(app, ["doctor", "--config", "cpu-tiny", "--json"])
    seconds = time.monotonic() - start
    report = json.loads(result.stdout)
    by_id = {check["id"]: check for check in report["checks"]}
    assert list(by_id) == list(CHECKS)
    failed = [check for check in report["checks"] if check["verdict"] == "FAIL"]
    # The port may be taken by another program of this machine; nothing else may be wrong here.
    assert [check["id"] for check in failed] in ([], ["port"]), failed
    assert result.exit_code == (3 if failed else 0)
    # 5 s on an idle machine; the tests may share theirs.
    assert seconds < 15


def test_command_fails_with_3_and_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    result = CliRunner().invoke(app, ["doctor", "--config", H200])
    assert result.exit_code == 3
    assert "FAIL" in result.stdout
