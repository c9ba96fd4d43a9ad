"""From samples to the headline: the slowest rank, with the first call kept apart."""

import pytest

from epdecode.result.timing import build_throughput, build_timing, slow_ranks, slowest_per_step


def test_headline_is_the_slowest_rank_of_each_step():
    timing = build_timing({0: [1000.0, 4000.0], 1: [3000.0, 2000.0]}, layers=2)
    assert (timing.step.min, timing.step.max) == (3000, 4000)
    assert (timing.layer.min, timing.layer.max) == (1500, 2000)


def test_a_rank_three_times_slower_is_the_headline():
    steady = {0: [1000.0] * 20, 1: [3000.0] * 20}
    timing = build_timing(steady, layers=1)
    assert timing.step.p50 == 3000
    assert timing.per_rank[0].step.p50 == 1000
    extremes = timing.extremes
    assert (extremes.fastest_rank, extremes.slowest_rank) == (0, 1)
    assert extremes.slowest_us_p50 / extremes.fastest_us_p50 == 3
    assert build_throughput(16, timing).tokens_per_s == pytest.approx(16 / 3e-3)


def test_unfinished_steps_are_left_out():
    assert slowest_per_step({0: [1.0, 2.0, 9.0], 1: [5.0, 1.0]}) == [5.0, 2.0]


def test_stages_are_pooled_and_waits_are_shares():
    stages = {
        0: {"route": [10.0, 10.0], "dispatch_wait": [30.0, 30.0]},
        1: {"route": [30.0, 30.0], "dispatch_wait": [10.0, 10.0]},
    }
    timing = build_timing({0: [50.0], 1: [50.0]}, 1, instrumented={0: [52.0]}, stages=stages)
    assert (timing.stages["route"].n, timing.stages["route"].mean) == (4, 20)
    assert [rank.wait_share for rank in timing.per_rank] == [0.75, 0.25]
    assert timing.wait_share == 0.5
    assert timing.instrumented_step.p50 == 52


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="no rank finished"):
        build_timing({}, layers=1)


def test_slow_rank_is_the_one_that_does_not_wait():
    plain = {rank: [100.0] * 5 for rank in range(3)}
    stages = {
        0: {"down_gemm": [30.0] * 5, "combine_wait": [70.0] * 5},
        1: {"down_gemm": [95.0] * 5, "combine_wait": [5.0] * 5},
        2: {"down_gemm": [32.0] * 5, "combine_wait": [68.0] * 5},
    }
    warnings = slow_ranks(build_timing(plain, 1, instrumented=plain, stages=stages))
    assert warnings == ("rank 1 is slow: busy for 95.0 us, the median rank for 32.0 us",)
    assert slow_ranks(build_timing(plain, 1)) == ()


def test_slow_rank_without_stages():
    timing = build_timing({0: [10.0], 1: [10.0], 2: [16.0]}, 1)
    assert len(slow_ranks(timing)) == 1
