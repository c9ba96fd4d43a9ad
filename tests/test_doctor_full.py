"""The parts of ``doctor --full``: over real gloo ranks, and against doubles of GPU libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from epdecode.doctor.check import Outcome, Verdict
from epdecode.doctor.command import full_checks
from epdecode.doctor.machine import Machine
from epdecode.doctor.nvml import Gpus
from epdecode.doctor.parts import PARTS, bandwidth, deep_ep, deep_gemm, gloo
from epdecode.registry import load_member
from epdecode.world import World
from tests.fakes import deep_ep as fake_deep_ep
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo(size) -> None:
    outcomes = run_ranks(size, gloo.check)
    assert [outcome.verdict for outcome in outcomes] == [Verdict.OK] * size


def corrupted(world: World) -> Outcome:
    if world.rank == 0:
        gloo.ring_block = lambda rank: torch.zeros(gloo.BYTES, dtype=torch.uint8)
    return gloo.check(world)


def test_gloo_that_brings_other_bytes() -> None:
    outcomes = run_ranks(2, corrupted)
    assert outcomes[1].verdict is Verdict.FAIL
    assert "rank 1: other bytes than rank 0 sent" in outcomes[1].saw


def test_ring_blocks_differ() -> None:
    assert not torch.equal(gloo.ring_block(0), gloo.ring_block(1))


def test_bandwidth_over_gloo() -> None:
    outcomes = run_ranks(2, bandwidth.check)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].saw.startswith("gloo: ")
    assert len(outcomes[0].saw.splitlines()) == 3, "the matrix of 2 x 2"


def test_bandwidth_names_the_slow_pair() -> None:
    matrix = [[0.0, 390.0, 391.0], [388.0, 0.0, 20.0], [392.0, 389.0, 0.0]]
    outcome = bandwidth.judge(matrix, "NVSHMEM get")
    assert outcome.verdict is Verdict.WARN
    assert "rank 1 reads from 2 at 20.00 GB/s" in outcome.want
    matrix[1][2] = 380.0
    assert bandwidth.judge(matrix, "NVSHMEM get").verdict is Verdict.OK


def low_latency(world: World, spoil: str) -> Outcome:
    """The LL part over the double; ``spoil`` breaks one rank's result."""
    fake_deep_ep.install()
    torch.cuda.synchronize = lambda: None
    real = fake_deep_ep.Buffer.low_latency_combine

    def combine(self, *args, **kwargs):
        out, event, receive = real(self, *args, **kwargs)

        def receive_and_spoil() -> None:
            receive()
            out[3, 5] += 1

        return out, event, receive_and_spoil

    if spoil == "row" and world.rank == 1:
        fake_deep_ep.Buffer.low_latency_combine = combine
    if spoil == "count" and world.rank == 1:
        deep_ep.expected_counts = lambda world: torch.zeros(deep_ep.LOCAL_EXPERTS)
    return deep_ep.check_low_latency(world)


@pytest.mark.parametrize("size", [1, 2])
def test_low_latency(size) -> None:
    outcomes = run_ranks(size, low_latency, "")
    assert [outcome.verdict for outcome in outcomes] == [Verdict.OK] * size


@pytest.mark.parametrize(
    ("spoil", "saw"),
    [("row", "rank 1: rows [3] came back different"), ("count", "rank 1: rows per expert")],
)
def test_low_latency_that_brings_other_values(spoil, saw) -> None:
    outcomes = run_ranks(2, low_latency, spoil)
    assert [outcome.verdict for outcome in outcomes] == [Verdict.OK, Verdict.FAIL]
    assert outcomes[1].saw.startswith(saw)


def test_rows_and_routes_have_what_the_parts_rely_on() -> None:
    cpu = torch.device("cpu")
    rows = deep_ep.rows_of(3, cpu)
    assert torch.equal(rows, rows.float().round().to(torch.bfloat16))
    assert rows.float().max() <= 128
    for size in (1, 2, 8):
        routes = torch.cat([deep_ep.routes_of(rank, size, cpu) for rank in range(size)])
        assert (routes[:, 0] != routes[:, 1]).all()
        owners = routes // deep_ep.LOCAL_EXPERTS
        assert size == 1 or (owners[:, 0] != owners[:, 1]).all()


def test_high_throughput_is_left_out_where_the_library_has_no_config() -> None:
    outcome = run_ranks(1, deep_ep.check_high_throughput)[0]
    assert (outcome.verdict, "not run with 1 rank(s)" in outcome.saw) == (Verdict.OK, True)


@pytest.mark.parametrize(("error", "verdict"), [(0.0, Verdict.OK), (2.0, Verdict.FAIL)])
def test_deep_gemm(monkeypatch, error, verdict) -> None:
    def gemm(a, b, out, counts, expected_rows) -> None:
        product = torch.bmm(a[0].float(), b[0].float().transpose(1, 2))
        out.copy_(product)
        out[1, 4, 7] += error
        # Rows past the count are anything.
        out[1, deep_gemm.COUNTS[1] :] = float("nan")

    fake = types.SimpleNamespace(m_grouped_fp8_gemm_nt_masked=gemm)
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    here = types.SimpleNamespace(device=torch.device("cpu"), rank=0)
    assert deep_gemm.check(here).verdict is verdict


@pytest.mark.parametrize("name", PARTS)
def test_every_part_can_be_loaded(name) -> None:
    assert callable(load_member("doctor", {name: PARTS[name].member}, name))


def environment(**changes: str) -> dict[str, str]:
    names = ("PATH", "HOME", "TMPDIR")
    base = {name: os.environ[name] for name in names if name in os.environ}
    return {**base, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


@pytest.mark.torchrun
def test_full_on_a_cpu_machine() -> None:
    here = Machine(env=environment(), ranks=2, gpus=Gpus(reason="none"))
    checks = full_checks(here)
    assert [check.id for check in checks] == list(PARTS)
    assert {check.outcome.verdict for check in checks} == {Verdict.OK}


@pytest.mark.torchrun
def test_a_part_that_dies_or_hangs_costs_its_own_row(tmp_path) -> None:
    """Rank 1 dies in one part and hangs in the next; rank 0 waits for it in vain in both."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, os, time\n"
        "part = sys.orig_argv[-1] if 'epdecode.doctor.parts' in sys.orig_argv else ''\n"
        "if os.environ.get('RANK') == '1' and part == 'full.gloo':\n"
        "    print('NVSHMEM ERROR: no more teams available', flush=True); os._exit(9)\n"
        "if os.environ.get('RANK') == '1' and part == 'full.bandwidth':\n"
        "    time.sleep(600)\n"
        "if 'epdecode.doctor.full' in sys.orig_argv:\n"
        "    from epdecode.doctor import parts\n"
        "    for name, part in list(parts.PARTS.items()):\n"
        "        parts.PARTS[name] = parts.Part(part.member, 6, part.gpu)\n"
    )
    child = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "epdecode.doctor.full", "--json", "--log-folder", str(tmp_path / "logs"),
            "--part", "full.gloo", "--part", "full.bandwidth",
        ],
        env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    line = next(each for each in child.stdout.splitlines() if each.startswith('{"schema"'))
    rows = {row["id"]: row for row in json.loads(line)["checks"]}
    assert child.returncode != 0
    assert [row["verdict"] for row in rows.values()] == ["FAIL", "FAIL"]
    assert rows["full.bandwidth"]["seconds"] < 25
    log = tmp_path / "logs/full.gloo.rank1.log"
    assert "no more teams" in log.read_text()
