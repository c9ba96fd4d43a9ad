"""The HTML report: one file, nothing from outside, nothing unescaped."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from epdecode.report.html import MOST_POINTS, page
from epdecode.result import STAGES, Cause
from epdecode.result.document import withhold_speed
from tests.documents import METHOD, make_result

VOID = {"meta", "br"}


def lines(ranks=2, steps=30):
    return [
        {"rank": rank, "pass": "plain", "step": step, "us": 100.0 + rank + step}
        for rank in range(ranks)
        for step in range(steps)
    ] + [{"rank": 0, "pass": "warmup", "step": 0, "us": 1e6}]


class Checker(HTMLParser):
    """Tags close in order; collects what would be fetched, and scripts."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.scripts, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text.append(data)


def check(text):
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.fetched == []
    return checker


def charts(text):
    return json.loads(re.search(r"^const charts = (.*);$", text, re.MULTILINE).group(1))


def test_whole_page():
    text = page(make_result(warnings=("no warm-up",)), lines())
    shown = " ".join(check(text).text)
    for word in (*STAGES, "passed", "no warm-up", "NVIDIA H200", "78% reached", "imbalance 1.94"):
        assert word in shown
    assert "uPlot=function" in text
    assert text.count('class="mark"') == 1


def test_steps_chart_has_each_rank_and_no_warm_up():
    steps, by_rank = charts(page(make_result(), lines()))
    assert steps["series"] == ["rank 0", "rank 1"]
    assert steps["data"][0] == list(range(30))
    assert steps["data"][2] == [101.0 + step for step in range(30)]
    assert by_rank["data"][0] == [0, 1, 2, 3]


def test_many_steps_are_thinned_to_the_slowest():
    samples = lines(ranks=1, steps=5 * MOST_POINTS)
    samples[17]["us"] = 9e9
    chart = charts(page(make_result(), samples))[0]
    assert len(chart["data"][0]) == MOST_POINTS
    assert max(chart["data"][1]) == 9e9
    assert "slowest of 5 steps" in chart["title"]


def test_many_ranks_show_the_extremes():
    chart = charts(page(make_result(), lines(ranks=12)))[0]
    assert chart["series"] == ["rank 0", "rank 3"]


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", "</script><img src=x>", '"><b>', "{{ 7 * 7 }}"]
)
def test_text_is_escaped(hostile):
    result = make_result(
        name=hostile,
        status="failed",
        config={hostile: hostile},
        plan={"x": hostile},
        cause=Cause(kind="exception", message=hostile),
        warnings=(hostile,),
    )
    checker = check(page(result, lines()))
    assert len(checker.scripts) == 2
    assert " ".join(checker.text).count(hostile) >= 5


def test_shared_gpu_has_no_time():
    text = page(withhold_speed(make_result(method=replace(METHOD, shared_gpu=True))), lines())
    shown = " ".join(check(text).text)
    assert "correctness only" in shown
    assert "const charts" not in text
    assert "Steps over time" not in shown


def test_failed_run_without_figures():
    result = make_result(
        status="failed",
        timing=None,
        throughput=None,
        floors={},
        layer_floor=None,
        expert_load=None,
        memory={},
        step_counts=None,
        verification=None,
        cause=Cause(kind="died", message="rank 1 is gone"),
    )
    shown = " ".join(check(page(result, [])).text)
    assert "rank 1 is gone" in shown
    assert "count only in a run that passed" in shown
