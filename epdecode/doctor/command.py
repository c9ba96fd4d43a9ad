"""``epdecode doctor``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epdecode.config.load import find_preset, load_config
from epdecode.doctor.check import Check, Outcome, Verdict, fail, run_checks
from epdecode.doctor.classify import Finding, classify, judge
from epdecode.doctor.machine import Machine, nodes_of
from epdecode.doctor.render import print_table, to_json, worst
from epdecode.doctor.table import CHECKS
from epdecode.errors import ConfigError, Exit

LIMIT_S = 90.0
"""For the basic checks together; they take seconds, unless a driver or a mount hangs."""
FULL_LIMIT_S = 600.0


def doctor(
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="Check for this config, plan included.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also start ranks: gloo, NVSHMEM, DeepEP, DeepGEMM.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", min=1, help="Ranks. Default: one per GPU, or 2.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", "-N", min=1, help="Nodes. Default: Slurm's, or 1.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", help="Only explain the known lines of this log.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find what would keep a job from running here; exit code 3 on any FAIL."""
    if log is not None:
        checks = _explain_log(log, nodes or 1, as_json)
    else:
        machine = _machine(config, ranks, nodes)
        checks = run_checks(CHECKS, machine, LIMIT_S)
        if full:
            checks += full_checks(machine)
    if as_json:
        typer.echo(to_json(checks))
    else:
        print_table(checks, Console())
    if worst(checks) is Verdict.FAIL:
        raise typer.Exit(Exit.ENVIRONMENT)


def _machine(config: str | None, ranks: int | None, nodes: int | None) -> Machine:
    path = find_preset(config) if config else None
    machine = Machine(
        config=load_config(path) if path else None,
        config_path=str(path) if path else None,
        nodes=nodes or nodes_of(os.environ),
    )
    count = ranks or (len(machine.gpus.devices) or 2) * machine.nodes
    return Machine(
        config=machine.config,
        config_path=machine.config_path,
        nodes=machine.nodes,
        gpus=machine.gpus,
        ranks=count,
    )


def full_checks(machine: Machine) -> list[Check]:
    """The parts of ``--full`` on this node, under torchrun; one FAIL when they cannot start."""
    with tempfile.TemporaryDirectory(prefix="epdecode-doctor-") as folder:
        out = Path(folder) / "checks.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(machine.ranks)]
        command += ["-m", "epdecode.doctor.full", "--out", str(out)]
        env = {"OMP_NUM_THREADS": "1", **machine.env}
        try:
            child = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=FULL_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            late = fail(f"no answer in {FULL_LIMIT_S:g} s", "an answer", "see the ranks' logs")
            return [Check("full", late, FULL_LIMIT_S)]
        if not out.exists():
            lines = (child.stderr.strip() or child.stdout.strip() or "no output").splitlines()
            outcome = judge(classify(lines, machine.nodes), "torchrun's output")
            if outcome.verdict is not Verdict.FAIL:
                outcome = fail(lines[-1], "torchrun starts the ranks", "run it by hand")
            return [Check("full", outcome, 0.0)]
        return [
            Check(
                row["id"],
                Outcome(Verdict(row["verdict"]), row["saw"], row["want"], row["fix"]),
                row["seconds"],
            )
            for row in json.loads(out.read_text())["checks"]
        ]


def _explain_log(log: Path, nodes: int, as_json: bool) -> list[Check]:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"--log {log}: {error.strerror}") from error
    findings = classify(lines, nodes)
    if not as_json:
        for finding in findings:
            typer.echo(_shown(finding))
    return [Check("log", judge(findings, str(log)), 0.0)]


def _shown(finding: Finding) -> str:
    return (
        f"line {finding.line_number}, {finding.role}: {finding.line}\n"
        f"    cause:  {finding.cause}\n    remedy: {finding.remedy}"
    )
