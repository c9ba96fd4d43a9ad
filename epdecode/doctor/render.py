"""The report: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from epdecode.doctor.check import Check, Verdict

_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
SCHEMA = "epdecode.doctor/1"


def worst(checks: Sequence[Check]) -> Verdict:
    """The report in one word."""
    verdicts = {check.outcome.verdict for check in checks}
    return next(each for each in (Verdict.FAIL, Verdict.WARN, Verdict.OK) if each in verdicts)


def to_json(checks: Sequence[Check]) -> str:
    """One JSON object; ``checks`` in the table's order."""
    rows = [
        {
            "id": check.id,
            "verdict": check.outcome.verdict.value,
            "saw": check.outcome.saw,
            "want": check.outcome.want,
            "fix": check.outcome.fix,
            "seconds": round(check.seconds, 3),
        }
        for check in checks
    ]
    return json.dumps({"schema": SCHEMA, "verdict": worst(checks).value, "checks": rows})


def print_table(checks: Sequence[Check], console: Console) -> None:
    """One row a check; what is wanted and how to get there only where something is wrong."""
    table = Table("check", "", "saw", "want", "fix", header_style="bold")
    for check in checks:
        outcome = check.outcome
        verdict = Text(outcome.verdict.value, style=_STYLES[outcome.verdict])
        # Text, not str: file names and messages may hold rich's markup.
        table.add_row(check.id, verdict, Text(outcome.saw), Text(outcome.want), Text(outcome.fix))
    console.print(table)
    bad = [check for check in checks if check.outcome.verdict is not Verdict.OK]
    failed = sum(check.outcome.verdict is Verdict.FAIL for check in bad)
    console.print(f"{len(checks)} checks: {failed} FAIL, {len(bad) - failed} WARN")
