"""When requests leave."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from quire.cli.bench.load.datasets import arrival_times
from quire.errors import ValidationError


def gaps(times):
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_variation_of_their_gamma_distribution(burstiness, variation):
    found = gaps(arrival_times(20_000, 50.0, burstiness, 1, seed=1))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(variation, rel=0.05)  # 1/√shape


def test_poisson_arrivals_in_a_second_vary_as_much_as_they_are_many():
    times = arrival_times(40_000, 20.0, 1.0, 1, seed=2)
    counts = [0] * math.ceil(times[-1])
    for time in times:
        counts[int(time)] += 1
    assert statistics.pvariance(counts[:-1]) == pytest.approx(20, rel=0.15)


def test_bursts_leave_together_and_keep_the_rate():
    times = arrival_times(8_000, 100.0, 1.0, 8, seed=3)
    assert all(len(set(times[i : i + 8])) == 1 for i in range(0, 8_000, 8))
    assert len(times) / times[-1] == pytest.approx(100, rel=0.1)


def test_an_infinite_rate_is_everything_at_once():
    assert arrival_times(5, math.inf, 1.0, 1, seed=0) == [0.0] * 5


def test_a_seed_gives_the_same_times():
    assert arrival_times(50, 3.0, 1.0, 1, seed=4) == arrival_times(50, 3.0, 1.0, 1, seed=4)
    assert arrival_times(50, 3.0, 1.0, 1, seed=4) != arrival_times(50, 3.0, 1.0, 1, seed=5)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, math.inf)])
def test_impossible_arrivals_are_refused(rate, burstiness):
    with pytest.raises(ValidationError, match="must be above 0"):
        arrival_times(1, rate, burstiness, 1, seed=0)
