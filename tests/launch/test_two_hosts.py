"""torchrun over a real network of two hosts: the right interface works, wrong ones are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from tests.launch import netns
from tests.launch.scripts import PASSED_ON, ROOT

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(150)]

PORT = "29431"


@pytest.fixture(scope="module")
def hosts():
    if reason := netns.missing():
        pytest.skip(reason)
    with netns.two_hosts() as pair:
        yield pair


def environment(**variables: str) -> dict[str, str]:
    base = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**base, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def run(hosts, tmp_path, make_command, **variables: str) -> tuple[list[int], list[str], float]:
    """Exit codes, logs, seconds; both hosts are started and, after 60 s, ended."""
    start = time.monotonic()
    logs = [tmp_path / f"host{index}.log" for index in range(2)]
    children = [
        host.start(
            make_command(index, host),
            environment(NODE_RANK=str(index), **variables),
            logs[index],
        )
        for index, host in enumerate(hosts)
    ]
    try:
        for child in children:
            child.wait(max(0.1, start + 60 - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        seconds = time.monotonic() - start
        for child in children:
            child.terminate()
            child.wait(30)
    return [child.returncode for child in children], [log.read_text() for log in logs], seconds


def node_sh(tmp_path):
    def command(index: int, host: netns.Host) -> list[str]:
        return ["bash", str(ROOT / "launch/node.sh"), "--ranks", "2", "--out", str(tmp_path)]

    return command


def torchrun(hosts, tmp_path):
    """By hand, without what launch/ checks and sets: the job itself must refuse."""

    def command(index: int, host: netns.Host) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "2", "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-id", "two-hosts",
            "--rdzv-endpoint", f"{hosts[0].address}:{PORT}",
            "--rdzv-conf", f"is_host={index == 0}", "--local-addr", host.address,
            "-m", "epdecode.run", "--out", str(tmp_path),
        ]  # fmt: skip

    return command


def shared(hosts) -> dict[str, str]:
    return {
        "NNODES": "2", "MASTER": hosts[0].address, "RDZV_ID": "two-hosts", "RDZV_PORT": PORT,
        "EPDECODE_PYTHON": sys.executable,
    }  # fmt: skip


def test_node_sh_finds_the_interface(hosts, tmp_path) -> None:
    codes, logs, _ = run(hosts, tmp_path, node_sh(tmp_path), **shared(hosts))
    assert codes == [0, 0], logs
    line = json.loads(logs[0].strip().splitlines()[-1])
    assert (line["status"], line["world_size"]) == ("passed", 4)


def test_torchrun_with_the_interface_named(hosts, tmp_path) -> None:
    codes, logs, _ = run(
        hosts, tmp_path, torchrun(hosts, tmp_path), GLOO_SOCKET_IFNAME=netns.INTERFACE
    )
    assert codes == [0, 0], logs


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"GLOO_SOCKET_IFNAME": "nope0"}, "GLOO_SOCKET_IFNAME='nope0' is no interface"),
        ({}, "resolves to a loopback address"),
    ],
    ids=["unknown interface", "loopback host name"],
)
def test_wrong_interface_is_refused(hosts, tmp_path, variables, message) -> None:
    codes, logs, seconds = run(hosts, tmp_path, torchrun(hosts, tmp_path), **variables)
    assert 0 not in codes
    for log, host in zip(logs, hosts, strict=True):
        assert message in log, log
        assert f"{netns.INTERFACE} ({host.address})" in log, "the interfaces there are"
    assert seconds < 60
