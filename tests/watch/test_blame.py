"""Who is at fault: one row a situation, judged from what one rank sees."""

import pytest

from epdecode.config import LimitsConfig
from epdecode.watch.blame import Seen, find_fault, progress_limit, stale_limit
from epdecode.watch.progress import PASS_END, Position

LIMITS = LimitsConfig(join_s=60, warmup_s=600, step_s=20, stale_s=3)
NOW = 1000.0


def seen(rank, *, phase="steps", step=7, stage="route", ticks=50, idle=0.0, silent=0.0, **more):
    return Seen(
        rank=rank,
        host=more.pop("host", f"n{rank // 2}"),
        state=more.pop("state", "running"),
        beat_at=NOW - silent,
        moved_at=NOW - idle,
        at=Position(phase, step, stage, ticks, 0),
        **more,
    )


def judge(*ranks):
    return find_fault(NOW, ranks, LIMITS)


def test_all_well():
    assert judge(seen(0), seen(1, idle=19.9), seen(2, silent=2.9)) is None


def test_died():
    cause = judge(seen(0), seen(1, state="gone", stage="down_gemm"), seen(2))
    assert (cause.kind, cause.rank, cause.host) == ("died", 1, "n0")
    assert (cause.step, cause.stage) == (7, "down_gemm")
    assert "rank 1 on n0 is gone" in cause.message
    assert "in step 7, stage down_gemm" in cause.message


def test_one_that_left_properly_has_not_died():
    assert judge(seen(0, phase="report"), seen(1, phase="left", state="gone")) is None


def test_two_dead_are_both_told():
    cause = judge(seen(0), seen(1, state="gone"), seen(2, state="gone"))
    assert cause.rank == 1
    assert "so are ranks [2]" in cause.message


@pytest.mark.parametrize(("silent", "kind"), [(2.9, None), (3.1, "stopped")])
def test_stopped_only_when_its_beat_is_stale(silent, kind):
    cause = judge(seen(0), seen(1, state="stopped", silent=silent))
    assert (cause and cause.kind) == kind


@pytest.mark.parametrize(("state", "kind"), [("running", "frozen"), ("elsewhere", "silent")])
@pytest.mark.parametrize(("phase", "limit"), [("steps", 3), ("warmup", 30), ("load", 30)])
def test_silence(state, kind, phase, limit):
    assert judge(seen(0), seen(1, state=state, phase=phase, silent=limit - 0.1)) is None
    cause = judge(seen(0), seen(1, state=state, phase=phase, silent=limit + 0.1))
    assert (cause.kind, cause.rank) == (kind, 1)


def test_dead_before_silent_before_stalled():
    late = seen(0, idle=100), seen(1, silent=100), seen(2, state="gone")
    assert judge(*late).rank == 2
    assert judge(*late[:2]).rank == 1


def test_absent():
    def absent(age):
        return Seen(rank=3, beat_at=NOW - age, moved_at=NOW - age)

    assert judge(seen(0, phase="join"), absent(59)) is None
    cause = judge(seen(0, phase="join"), absent(61))
    assert (cause.kind, cause.rank, cause.host) == ("absent", 3, None)
    assert "limits.join_s = 60" in cause.message


def test_the_least_advanced_is_blamed_not_those_that_wait():
    cause = judge(
        seen(0, idle=21, ticks=52, stage="combine_wait"),
        seen(1, idle=21, ticks=51, stage="down_gemm"),
        seen(2, idle=21, ticks=52, stage="combine_wait"),
    )
    assert (cause.kind, cause.rank, cause.stage) == ("stalled", 1, "down_gemm")


def test_in_one_stage_the_one_that_does_not_wait_is_blamed():
    cause = judge(seen(0, idle=21, waits=True), seen(1, idle=21), seen(2, idle=21, waits=True))
    assert (cause.kind, cause.rank) == ("stalled", 1)


def test_nobody_is_blamed_when_all_wait():
    cause = judge(seen(0, idle=21, waits=True), seen(1, idle=21, waits=True))
    assert (cause.kind, cause.rank, cause.step, cause.stage) == ("stalled", None, 7, "route")
    assert "transport or the network" in cause.message


def test_a_rank_in_warm_up_has_the_long_clock_though_others_wait():
    waiting = seen(0, phase="steps", idle=100, waits=True)
    assert judge(waiting, seen(1, phase="warmup", idle=100)) is None
    cause = judge(waiting, seen(1, phase="warmup", stage=None, idle=601))
    assert (cause.kind, cause.rank, cause.stage) == ("stalled", 1, "warmup")


def test_skipped_step():
    """Rank 1 is done, with fewer stages behind it than its peers, which wait in the last step."""
    cause = judge(
        seen(0, idle=21, ticks=40, step=9, waits=True),
        seen(1, idle=21, ticks=36, step=9, phase="report"),
        seen(2, idle=21, ticks=40, step=9, waits=True),
    )
    assert (cause.kind, cause.rank) == ("skipped", 1)


@pytest.mark.parametrize(("step", "stage"), [(9, "combine_wait"), (9, PASS_END)])
def test_skipped_step_of_a_pass(step, stage):
    """Rank 1 waits for its peers between two passes."""
    cause = judge(
        seen(0, idle=21, ticks=40, step=step, stage=stage, waits=True),
        seen(1, idle=21, ticks=36, step=9, stage=PASS_END, waits=True),
    )
    assert (cause.kind, cause.rank, cause.stage) == ("skipped", 1, PASS_END)
    assert "after step 9, the last of a pass" in cause.message


def test_asleep_between_two_passes_is_no_skipped_step():
    cause = judge(
        seen(0, idle=21, ticks=41, step=0, waits=True),
        seen(1, idle=21, ticks=40, step=9, stage=PASS_END),
    )
    assert (cause.kind, cause.rank) == ("stalled", 1)


def test_waiting_at_the_end_of_a_pass_for_one_asleep_in_its_last_step():
    cause = judge(
        seen(0, idle=21, ticks=40, step=9, stage=PASS_END, waits=True),
        seen(1, idle=21, ticks=40, step=9, stage="combine_wait"),
    )
    assert (cause.kind, cause.rank) == ("stalled", 1)


def test_left_early_with_fewer_stages():
    cause = judge(seen(0, idle=21, ticks=40, waits=True), seen(1, ticks=36, phase="left"))
    assert (cause.kind, cause.rank) == ("skipped", 1)


def test_world_of_one():
    cause = judge(seen(0, idle=21))
    assert (cause.kind, cause.rank) == ("stalled", 0)


def test_limits_by_phase():
    phases = ("join", "load", "warmup", "steps", "report")
    assert [progress_limit(p, LIMITS) for p in phases] == [60, 600, 600, 20, 600]
    assert [stale_limit(p, LIMITS) for p in phases] == [30, 30, 30, 3, 30]
