"""Stats.of: nine figures of a list."""

import math

import numpy as np
import pytest

from epdecode.result.stats import Stats


@pytest.mark.parametrize("n", [1, 2, 3, 10, 101])
def test_equals_numpy(n):
    values = np.random.default_rng(n).lognormal(size=n)
    stats = Stats.of(values, "us")
    assert (stats.unit, stats.n) == ("us", n)
    expected = [values.mean(), values.std(), values.min(), *np.percentile(values, [50, 90, 99])]
    got = [stats.mean, stats.std, stats.min, stats.p50, stats.p90, stats.p99]
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)
    assert stats.max == values.max()


def test_refuses_nothing():
    with pytest.raises(ValueError, match=r"no values \(us\)"):
        Stats.of([], "us")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_non_finite(bad):
    with pytest.raises(ValueError, match=r"1 of 3 values not finite \(us\)"):
        Stats.of([1.0, bad, 2.0], "us")
