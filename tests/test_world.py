"""Joining, agreeing, gathering."""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from epdecode.errors import ConfigError, EnvironmentFault
from epdecode.launch.env import Launch
from epdecode.world import World, agree, open_store
from tests.ranks import run_ranks


def gathered(world: World) -> tuple[list[str], list[list[float]]]:
    texts = world.gather_text("grüße " * world.rank)
    values = world.gather(torch.tensor([world.rank, 0.5]))
    return texts, [value.tolist() for value in values]


def test_text_and_values_reach_every_rank_in_order() -> None:
    for texts, values in run_ranks(3, gathered):
        assert texts == ["", "grüße ", "grüße grüße "]
        assert values == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]


def _agree(rank: int, size: int, path: str, facts: dict, timeout: float, queue) -> None:
    launch = Launch(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    try:
        agree(dist.FileStore(path, size), launch, facts, timeout)
    except Exception as error:  # noqa: BLE001 - its type is what is tested
        queue.put((rank, type(error), str(error)))
    else:
        queue.put((rank, None, ""))


def outcomes(size: int, facts: dict[int, dict], timeout: float = 20) -> dict[int, tuple]:
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        processes = [
            context.Process(target=_agree, args=(rank, size, path, facts[rank], timeout, queue))
            for rank in facts
        ]
        for process in processes:
            process.start()
        ended = [queue.get(timeout=40) for _ in processes]
        for process in processes:
            process.join()
    return {rank: (kind, text) for rank, kind, text in ended}


def facts(tokens: int = 16, torch_version: str = "2.11") -> dict:
    return {
        "config": {"plan.max_tokens": str(tokens), "digest": str(hash(tokens))},
        "versions": {"torch": torch_version},
    }


def test_a_rank_with_another_limit_is_named_on_every_rank() -> None:
    ended = outcomes(2, {0: facts(16), 1: facts(32)})
    for kind, text in ended.values():
        assert kind is ConfigError
        assert "config plan.max_tokens: rank 1 has 32, rank 0 has 16" in text


def test_the_odd_one_of_three_is_named_even_when_it_is_rank_0() -> None:
    ended = outcomes(3, {0: facts(torch_version="2.9"), 1: facts(), 2: facts()})
    for kind, text in ended.values():
        assert kind is EnvironmentFault
        assert "versions torch: rank 0 has 2.9, rank 1 has 2.11" in text


def test_equal_ranks_agree() -> None:
    assert outcomes(2, {0: facts(), 1: facts()}) == {0: (None, ""), 1: (None, "")}


def test_a_rank_that_never_comes_is_named_in_time() -> None:
    began = time.monotonic()
    ended = outcomes(2, {0: facts()}, timeout=1)
    assert ended[0][0] is EnvironmentFault
    assert "rank(s) 1 of 2 did not join within limits.join_s = 1 s" in ended[0][1]
    assert time.monotonic() - began < 20


def launched(rank: int, address: str, port: int, **more: object) -> Launch:
    here = {"local_rank": rank, "local_world_size": 2, **more}
    return Launch(rank=rank, world_size=2, master_addr=address, master_port=port, **here)


def listening(port: int) -> set[str]:
    """Addresses at which this process listens at the port."""
    return {
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }


@pytest.mark.parametrize("address", ["127.0.0.1", socket.gethostname(), "192.0.2.1"])
def test_rank_0s_own_store_on_one_node_listens_on_loopback_only(address) -> None:
    """Whatever address the environment gives the first node."""
    port = free_port()
    mine = open_store(launched(0, address, port), 5)
    assert listening(port) == {"127.0.0.1"}
    other = open_store(launched(1, address, port), 5)
    other.set("key", "value")
    assert mine.get("key") == b"value"
    assert mine.clone().get("key") == b"value"


def test_rank_0s_own_store_of_several_nodes_is_reached_from_them() -> None:
    port = free_port()
    store = open_store(launched(0, "127.0.0.1", port, local_world_size=1), 5)
    assert listening(port) in ({"0.0.0.0"}, {"::"})  # noqa: S104 - what it must be there
    del store


def test_a_port_in_use_is_an_environment_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=rf"rank 0 cannot serve .*:{port} .*in use"):
            open_store(launched(0, "127.0.0.1", port), 1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def test_a_store_that_cannot_be_reached_is_an_environment_fault() -> None:
    launch = Launch(
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        master_addr="127.0.0.1",
        master_port=1,
    )
    with pytest.raises(EnvironmentFault, match=r"rank 1 cannot reach the store at 127\.0\.0\.1:1"):
        open_store(launch, 1)
