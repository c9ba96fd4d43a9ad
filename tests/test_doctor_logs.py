"""The classifier of log lines: cause, role and remedy; the first real cause heads the rest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epdecode.cli import app
from epdecode.doctor.check import Verdict, fail, ok, warn
from epdecode.doctor.classify import Role, classify, judge
from epdecode.doctor.full import explain, worst_outcome
from epdecode.doctor.log_causes import CAUSES
from epdecode.errors import ConfigError

LINES = [
    tuple(line.split(": ", 1))
    for line in (Path(__file__).parent / "fixtures/log_lines.txt").read_text().splitlines()
    if not line.startswith("#")
]
"""(id of the cause, the line)"""


@pytest.mark.parametrize(("cause", "line"), LINES)
def test_known_line(cause, line) -> None:
    (finding,) = classify(["epdecode: starting", line], nodes=2)
    assert finding.id == cause
    assert finding.line_number == 2
    assert finding.cause
    assert finding.remedy


def test_every_cause_has_a_line() -> None:
    assert {cause.id for cause in CAUSES} == {cause for cause, _ in LINES}


@pytest.mark.parametrize(
    "line",
    [
        "rank 0 of 8, host team-7",
        "loaded module nvidia_peermem",
        "captured 8 graphs in 1.2 s",
        "NCCL INFO Connected all rings",
        "NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0>",
        "epdecode: mps of the layer 3.2, share 4.1%",
        '{"status": "passed", "step_us_p50": 101.0}',
    ],
)
def test_ordinary_line(line) -> None:
    assert classify([line], nodes=2) == []


# What an H200 node without RDMA prints while DeepEP starts, before anything goes wrong.
NODE_WITHOUT_RDMA = [
    "transport.cpp: neither nv_peer_mem, or nvidia_peermem detected. Skipping transport.",
    "ibgda.cpp: NULL value cannot allocate UAR",
    "WARN: init failed for transport: IBGDA",
]


def test_one_node_warns_and_goes_on() -> None:
    findings = classify(NODE_WITHOUT_RDMA, nodes=1)
    assert {finding.role for finding in findings} == {Role.HARMLESS}
    assert judge(findings, "x.log").verdict is Verdict.WARN


def test_several_nodes_are_refused_by_the_first_cause() -> None:
    findings = classify(NODE_WITHOUT_RDMA, nodes=2)
    assert [finding.id for finding in findings] == ["peermem", "uar", "ibgda"]
    outcome = judge(findings, "x.log")
    assert outcome.verdict is Verdict.FAIL
    assert outcome.saw.startswith("line 1 of x.log")
    assert "modprobe nvidia_peermem" in outcome.fix


def test_the_cause_heads_what_follows_from_it() -> None:
    lines = [
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        *NODE_WITHOUT_RDMA,
        "NVSHMEM ERROR: no more teams available",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    ]
    findings = classify(lines, nodes=1)
    assert findings[0].id == "teams"
    roles = [finding.role for finding in findings]
    assert roles == sorted(roles, key=list(Role).index)
    assert findings[1].id == "cuda"


def test_a_repeated_line_is_told_once() -> None:
    assert len(classify(NODE_WITHOUT_RDMA * 40, nodes=2)) == 3


def test_clean_log() -> None:
    assert judge(classify(["all is well"]), "x.log").verdict is Verdict.OK


def test_command(tmp_path) -> None:
    log = tmp_path / "run.log"
    log.write_text("\n".join(["start", *NODE_WITHOUT_RDMA]))
    alone = CliRunner().invoke(app, ["doctor", "--log", str(log)])
    assert alone.exit_code == 0
    assert "line 2, harmless here" in alone.stdout
    two = CliRunner().invoke(app, ["doctor", "--log", str(log), "--nodes", "2"])
    assert two.exit_code == 3
    assert "line 2, cause" in two.stdout
    assert "modprobe nvidia_peermem" in two.stdout


def test_command_without_the_file(tmp_path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--log", str(tmp_path / "none")])
    assert isinstance(result.exception, ConfigError)


def test_explain_a_dead_part(tmp_path) -> None:
    log = tmp_path / "part.log"
    log.write_text("\n".join([*NODE_WITHOUT_RDMA, "Assertion num_rc_per_pe failed", ""]))
    outcome = explain(log, "ended with exit code 1", nodes=1)
    assert outcome.verdict is Verdict.FAIL
    assert "num_rc_per_pe" in outcome.saw
    assert str(log) in outcome.saw
    log.write_text("something else\n\n")
    assert "last line: something else" in explain(log, "no answer in 3 s", nodes=1).saw


def test_worst_outcome_names_the_rank() -> None:
    outcomes = [ok("fine"), warn("slow", "fast", "wait"), fail("broken", "whole", "mend")]
    assert asdict(worst_outcome(outcomes)) == asdict(fail("rank 2: broken", "whole", "mend"))
    assert worst_outcome(outcomes[:2]).saw == "rank 1: slow"
    assert worst_outcome(outcomes[:1]) == outcomes[0]
