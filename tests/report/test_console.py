"""The console report: every section, plain off a terminal, readable at 80 columns."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from epdecode.report.console import figure, print_report, render
from epdecode.result import STAGES, Cause, NonFinite
from epdecode.result.document import withhold_speed
from tests.documents import METHOD, make_result


def printed(result):
    out = io.StringIO()
    print_report(result, out)
    return out.getvalue()


def test_sections():
    text = printed(make_result(warnings=("no warm-up steps",)))
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    for stage in STAGES:
        assert stage in text
    for word in ("PASSED", "p50", "p99", "share", "reached", "78%", "imbalance 1.94", "planned"):
        assert word in text
    assert "passed: 512 rows against torch_a2a + torch_loop, float32" in text
    assert "50 graph, 0 eager, 0 skipped" in text
    assert "warning: no warm-up steps" in text
    assert "slowest 3" in text


@pytest.mark.parametrize("width", [80, 100])
def test_fits(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(make_result()))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    table = [line for line in lines if line.startswith(tuple("┃│"))]
    assert table
    assert all("…" not in line for line in lines)


def test_shares_add_up_to_one():
    text = printed(make_result())
    rows = [line.split("│") for line in text.splitlines() if line.lstrip("│ ").startswith(STAGES)]
    shares = [float(row[5].strip().rstrip("%")) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_shared_gpu_shows_no_time():
    text = printed(withhold_speed(make_result(method=replace(METHOD, shared_gpu=True))))
    assert "correctness only, no speed" in text
    assert "microseconds in one layer" not in text
    assert "tokens/s" not in text


def test_failure_is_told():
    bad = NonFinite(
        counts={"down_gemm": 3}, first_rank=1, first_step=4, first_stage="down_gemm", first_expert=7
    )
    cause = Cause(kind="non_finite", message="3 NaN in down_gemm")
    text = printed(make_result(status="wrong", non_finite=bad, cause=cause))
    assert "WRONG" in text
    assert "non_finite: 3 NaN in down_gemm" in text
    assert "first at rank 1, step 4, stage down_gemm, expert 7" in text


def test_text_is_not_markup():
    assert "[red]x[/red]" in printed(make_result(name="[red]x[/red]"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.001234, "0.0012"), (0.5, "0.5"), (12.3456, "12.35"), (123456.7, "123,457")],
)
def test_figure(value, text):
    assert figure(value) == text
