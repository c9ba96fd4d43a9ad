"""Who am I: the launcher's environment, whole, absent or broken."""

from __future__ import annotations

import socket

import pytest

from epdecode.errors import EnvironmentFault
from epdecode.launch.env import Launch, check_network, read_launch

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TWO_NODES = Launch(
    rank=0, world_size=2, local_rank=0, local_world_size=1, master_addr="10.1.2.3", master_port=1
)


def test_torchrun() -> None:
    launch = read_launch(TORCHRUN)
    assert launch == Launch(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="node0",
        master_port=29500,
        agent_store=True,
    )
    assert not launch.one_node


def test_nothing_set_is_a_world_of_one() -> None:
    assert read_launch({}) == Launch()
    assert read_launch({"MASTER_ADDR": "left-over"}).one_node


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE not"),
        ({"LOCAL_RANK": "", "MASTER_PORT": ""}, "LOCAL_RANK, MASTER_PORT not"),
        ({"RANK": "4"}, "RANK=4 with WORLD_SIZE=4"),
        ({"RANK": "x"}, "RANK='x': accepted: an integer of at least 0"),
        ({"WORLD_SIZE": "0"}, "at least 1"),
        ({"LOCAL_RANK": "2"}, "contradict"),
        ({"LOCAL_WORLD_SIZE": "8"}, "contradict"),
    ],
)
def test_a_broken_environment_is_one_clear_line(change: dict[str, str], said: str) -> None:
    with pytest.raises(EnvironmentFault) as error:
        read_launch(TORCHRUN | change)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_missing_variable_comes_with_an_example() -> None:
    with pytest.raises(EnvironmentFault, match="torchrun --nproc-per-node"):
        read_launch({"RANK": "0"})


def test_a_slurm_task_without_torchrun_is_refused() -> None:
    env = {"SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
    with pytest.raises(EnvironmentFault, match="task 3 of 8"):
        read_launch(env)


def test_an_unknown_interface_is_refused_with_the_list() -> None:
    with pytest.raises(EnvironmentFault, match=r"GLOO_SOCKET_IFNAME='nope0'.*interfaces: .*lo"):
        check_network(Launch(), {"GLOO_SOCKET_IFNAME": "nope0"})


def test_loopback_master_with_several_nodes_is_refused() -> None:
    launch = Launch(rank=0, world_size=2, local_rank=0, local_world_size=1, master_addr="127.0.0.1")
    with pytest.raises(EnvironmentFault, match="MASTER_ADDR=127.0.0.1 is a loopback"):
        check_network(launch, {})


def test_host_name_on_loopback_with_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.gethostbyname
    monkeypatch.setattr(
        socket, "gethostbyname", lambda name: name if name[0].isdigit() else "127.0.1.1"
    )
    with pytest.raises(EnvironmentFault, match="resolves to a loopback address"):
        check_network(TWO_NODES, {})
    check_network(TWO_NODES, {"GLOO_SOCKET_IFNAME": "lo"})
    assert real is not socket.gethostbyname


def test_one_node_may_use_loopback() -> None:
    check_network(Launch(master_addr="127.0.0.1"), {})
