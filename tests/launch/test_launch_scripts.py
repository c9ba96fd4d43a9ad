"""The scripts of launch/: what they start, and what they refuse to start."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

import psutil
import pytest
import yaml

from tests.launch.scripts import ROOT, call

SHELL = sorted(
    [*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch"), *ROOT.glob("scripts/*.sh")]
) + [ROOT / ".ci/run"]
STANDALONE = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def address() -> tuple[str, str] | None:
    """An interface of this machine that others could reach, and its address."""
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family.name == "AF_INET" and not each.address.startswith("127."):
                return name, each.address
    return None


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shellcheck(path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    child = subprocess.run(
        ["shellcheck", "-x", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "ranks", "rest"),
    [
        ("launch/cpu.sh", [], "2", []),
        ("launch/cpu.sh", ["--ranks", "3", "run.steps=5"], "3", ["run.steps=5"]),
        ("launch/node.sh", ["--ranks", "4", "--config", "x y"], "4", ["--config", "x y"]),
        ("launch/shared_gpu.sh", ["--ranks", "8"], "8", []),
    ],
)
def test_one_node(tmp_path, script, arguments, ranks, rest) -> None:
    told = call(script, *arguments, folder=tmp_path)
    assert told.code == 0, told.stderr
    assert told.arguments == [*STANDALONE, ranks, "-m", "epdecode.run", *rest]
    assert told.environment["OMP_NUM_THREADS"] == "1"
    # Also without TMPDIR, and the same file system for all ranks of a node.
    cache = told.environment["TRITON_CACHE_DIR"]
    assert cache.startswith(tempfile.gettempdir())


def test_cpu_hides_the_gpus(tmp_path) -> None:
    told = call("launch/cpu.sh", folder=tmp_path, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert told.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_shared_gpu_takes_the_first_one(tmp_path) -> None:
    told = call("launch/shared_gpu.sh", folder=tmp_path, env={"CUDA_VISIBLE_DEVICES": "3,1"})
    assert told.environment["CUDA_VISIBLE_DEVICES"] == "3"


def test_slurm_tells_the_gpus_of_a_node(tmp_path) -> None:
    told = call("launch/node.sh", folder=tmp_path, env={"SLURM_GPUS_ON_NODE": "6"})
    assert told.option("--nproc-per-node") == "6"


SLURM = {"NNODES": "2", "RDZV_ID": "epdecode-7", "RDZV_PORT": "10007", "SLURM_NODEID": "1"}
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "RDZV_ID": "epdecode", "RDZV_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "master_name", "is_host", "rdzv_id", "port"),
    [
        ({**SLURM, **STEP}, "MASTER", "false", "epdecode-7", "10007"),
        ({**SLURM, **STEP, "SLURM_NODEID": "0"}, "MASTER", "true", "epdecode-7", "10007"),
        # What pyxis passes into the container: the same variables, no scontrol.
        ({**SLURM, **STEP, "PYXIS_RUNTIME_PATH": "/run/pyxis"}, "MASTER", "false", "epdecode-7",
         "10007"),
        (LWS, "LWS_LEADER_ADDRESS", "true", "epdecode", "29500"),
        ({**LWS, "LWS_WORKER_INDEX": "1"}, "LWS_LEADER_ADDRESS", "false", "epdecode", "29500"),
    ],
    ids=["srun", "srun-first", "pyxis", "lws-leader", "lws-worker"],
)  # fmt: skip
def test_one_of_two_nodes(tmp_path, env, master_name, is_host, rdzv_id, port) -> None:
    here = address()
    if here is None:
        pytest.skip("this machine has a loopback interface only")
    told = call(
        "launch/node.sh", "--ranks", "2", folder=tmp_path, env={**env, master_name: here[1]}
    )
    assert told.code == 0, told.stderr
    assert told.option("--nnodes") == "2"
    assert told.option("--nproc-per-node") == "2"
    assert told.option("--rdzv-id") == rdzv_id
    assert told.option("--rdzv-endpoint") == f"{here[1]}:{port}"
    assert told.option("--local-addr") == here[1]
    assert f"is_host={is_host}," in told.option("--rdzv-conf")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"):
        assert told.environment[name] == here[0]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is left over from another launch"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8 is left over"),
        ({"RANK": "1", "TORCHELASTIC_RUN_ID": "x"}, "double launch"),
        (
            {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"},
            "16 tasks on 2 node(s) (double launch)",
        ),
        ({**SLURM, "MASTER": "127.0.0.1"}, "127.0.0.1 is a loopback address"),
        ({**SLURM, "MASTER": "localhost"}, "localhost is a loopback address"),
        (SLURM, "MASTER is not set"),
        (
            {"NNODES": "2", "MASTER": "10.0.0.1", "GLOO_SOCKET_IFNAME": "nope0"},
            "GLOO_SOCKET_IFNAME='nope0' is no interface",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refused(tmp_path, env, message) -> None:
    told = call("launch/node.sh", folder=tmp_path, env=env)
    assert told.code != 0
    assert message in told.stderr
    assert told.arguments == [], "nothing may be started"


def test_refused_interface_lists_those_there_are(tmp_path) -> None:
    env = {**SLURM, "MASTER": "10.0.0.1", "GLOO_SOCKET_IFNAME": "nope0"}
    told = call("launch/node.sh", folder=tmp_path, env=env)
    assert "lo (127.0.0.1)" in told.stderr


def test_mps_needs_its_daemon(tmp_path) -> None:
    if shutil.which("nvidia-cuda-mps-control"):
        pytest.skip("this machine has MPS")
    told = call("launch/shared_gpu.sh", "--mps", folder=tmp_path)
    assert told.code == 3
    assert "no nvidia-cuda-mps-control" in told.stderr


def test_mps_daemon_is_private_and_ends_with_the_job(tmp_path) -> None:
    daemon = tmp_path / "nvidia-cuda-mps-control"
    daemon.write_text('#!/bin/sh\necho "${1:-$(cat)} $CUDA_MPS_PIPE_DIRECTORY" >>"$TOLD/daemon"\n')
    daemon.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    told = call("launch/shared_gpu.sh", "--ranks", "2", "--mps", folder=tmp_path,
                env={"PATH": path})  # fmt: skip
    assert told.code == 0, told.stderr
    pipe = told.environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert (tmp_path / "daemon").read_text().splitlines() == [f"-d {pipe}", f"quit {pipe}"]


def test_lws_manifest_starts_node_sh() -> None:
    manifest = yaml.safe_load((ROOT / "launch/lws.yaml").read_text())
    template = manifest["spec"]["leaderWorkerTemplate"]
    container = template["workerTemplate"]["spec"]["containers"][0]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert container["command"] == ["bash", "launch/node.sh", "--ranks", gpus]
    names = {each["name"] for each in container["env"]}
    assert {"RDZV_ID", "RDZV_PORT"} <= names
    config = container["args"][container["args"].index("--config") + 1]
    assert (ROOT / config).is_file()
