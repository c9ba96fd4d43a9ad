"""Lines of NVSHMEM, NCCL, gloo, torchrun and CUDA logs -> cause and remedy, first cause first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from epdecode.doctor.check import Outcome, fail, ok, warn
from epdecode.doctor.log_causes import CAUSES, Cause


class Role(StrEnum):
    """What a line means for this launch."""

    CAUSE = "cause"
    CONSEQUENCE = "consequence"
    """Follows from something else: another rank's or an earlier line's fault."""
    HARMLESS = "harmless here"


@dataclass(frozen=True, slots=True)
class Finding:
    """A known line. ``line_number`` counts from 1."""

    id: str
    role: Role
    line_number: int
    line: str
    cause: str
    remedy: str


def classify(lines: Iterable[str], nodes: int = 1) -> list[Finding]:
    """The first line of every known kind: causes in the log's order, then the rest.

    On one node a missing RDMA path is harmless: NVLink carries everything.
    """
    found: dict[str, Finding] = {}
    for number, line in enumerate(lines, start=1):
        known = next((cause for cause in CAUSES if re.search(cause.pattern, line)), None)
        if known is not None and known.id not in found:
            role = _role(known, nodes)
            found[known.id] = Finding(
                known.id, role, number, line.strip(), known.cause, known.remedy
            )
    order = list(Role)
    return sorted(found.values(), key=lambda each: (order.index(each.role), each.line_number))


def _role(cause: Cause, nodes: int) -> Role:
    if cause.consequence:
        return Role.CONSEQUENCE
    return Role.HARMLESS if cause.one_node_harmless and nodes == 1 else Role.CAUSE


def judge(findings: list[Finding], log: str) -> Outcome:
    """One outcome for a log: FAIL by its first cause, WARN when all it has is harmless here."""
    if not findings:
        return ok(f"no known fault in {log}")
    first = findings[0]
    saw = f"line {first.line_number} of {log}: {first.line[:160]}"
    if first.role is Role.HARMLESS:
        return warn(saw, "nothing: harmless on one node", "none")
    return fail(saw, f"not this: {first.cause}", first.remedy)
