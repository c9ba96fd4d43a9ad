"""EPDECODE_FAULT: only when allowed, only where it says, once."""

import pytest

from epdecode.errors import ConfigError, OutOfMemory
from epdecode.watch.faults import FAULTS, NO_FAULT, VARIABLE, read_fault


def fault(text, enabled=True):
    return read_fault({VARIABLE: text}, enabled)


def test_none_without_the_variable():
    assert read_fault({}, enabled=True) is NO_FAULT
    assert read_fault({}, enabled=False) is NO_FAULT
    NO_FAULT.hit(0, 0, "route")


def test_refused_unless_the_config_allows_it():
    with pytest.raises(ConfigError, match=r"debug\.faults is false"):
        fault("kill@1:3:route", enabled=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "kind@rank:step:stage"),
        ("kill@1", "kind@rank:step:stage"),
        ("kill@-1:0:route", "kind@rank:step:stage"),
        ("kil@1:0:route", "did you mean 'kill'"),
    ],
)
def test_malformed(text, message):
    with pytest.raises(ConfigError, match=message):
        fault(text)


def test_hits_its_rank_step_and_stage_once(monkeypatch):
    hits = []
    monkeypatch.setitem(FAULTS, "raise", lambda: hits.append(1))
    made = fault("raise@1:3:route")
    for rank, step, stage in [(0, 3, "route"), (1, 2, "route"), (1, 3, "act_quant")]:
        made.hit(rank, step, stage)
    assert hits == []
    made.hit(1, 3, "route")
    made.hit(1, 4, "route")
    assert hits == [1]


def test_slow_hits_again_and_again(monkeypatch):
    hits = []
    monkeypatch.setitem(FAULTS, "slow", lambda: hits.append(1))
    made = fault("slow@0:1:route")
    for step in range(4):
        made.hit(0, step, "route")
    assert len(hits) == 3


def test_star_is_the_first_time(monkeypatch):
    hits = []
    monkeypatch.setitem(FAULTS, "raise", lambda: hits.append(1))
    made = fault("raise@0:*:load")
    made.hit(0, None, "load")
    made.hit(0, None, "load")
    assert hits == [1]


def test_skip_is_for_the_loop():
    made = fault("skip@1:3:route")
    made.hit(1, 3, "route")
    assert [made.skips(1, step) for step in range(5)] == [False, False, False, True, False]
    assert not made.skips(0, 3)


def test_what_they_raise():
    with pytest.raises(ArithmeticError):
        fault("raise@0:0:route").hit(0, 0, "route")
    with pytest.raises(OutOfMemory, match="lower"):
        fault("oom@0:0:route").hit(0, 0, "route")
