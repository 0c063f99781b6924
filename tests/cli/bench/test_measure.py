"""Metrics of known results."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from quire.cli.bench.load.client import RequestResult
from quire.cli.bench.load.drive import LoadRun
from quire.cli.bench.load.measure import Distribution, RunMeasurements, percentile, read_goals
from quire.cli.bench.load.plot import plot
from quire.cli.bench.load.report import result_metrics
from quire.errors import ValidationError


def result(sent: float, ttft: float, gaps: list[float], **more) -> RequestResult:
    first = sent + ttft
    return RequestResult(
        sent, first=first, last=first + sum(gaps), gaps=gaps,
        **{"prompt_tokens": 10, "output_tokens": len(gaps) + 1, "is_counted_by_server": True, **more},
    )  # fmt: skip


def failed(sent: float, kind: str) -> RequestResult:
    return RequestResult(sent, last=sent + 0.1, failure=kind, detail="why")


RESULTS = [
    result(100.0, 0.1, [0.02] * 4),
    result(100.5, 0.3, [0.01] * 4),  # slow first token
    result(101.0, 0.1, [0.06] * 4),  # slow later tokens
    result(101.5, 0.2, [0.05] * 4),  # exactly at the limit, which is good
    result(102.0, 0.05, []),  # one token
    failed(102.0, "HTTP 429"),
    failed(102.1, "HTTP 429"),
    failed(102.2, "cut off"),
]
RUN = LoadRun(RESULTS, start=100.0, end=104.0, cpu=1.0)
GOALS = {"ttft": 200.0 + 1e-6, "tpot": 50.0 + 1e-6}


def test_goodput_counts_requests_that_meet_every_limit():
    found = result_metrics(RunMeasurements(RUN, GOALS), [], [])
    assert found["good_requests"] == 3
    assert found["request_goodput"] == pytest.approx(3 / 4.0)
    assert RunMeasurements(RUN, {"itl": 15.0}).good == 2
    assert RunMeasurements(RUN, {"e2el": 100.0}).good == 1


def test_totals():
    found = result_metrics(RunMeasurements(RUN, {}), ["ttft"], [99], detailed=True)
    assert (found["completed"], found["failed"]) == (5, 3)
    assert found["failures"] == {"HTTP 429": 2, "cut off": 1}
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (50, 21)
    assert found["request_throughput"] == pytest.approx(5 / 4)
    assert found["output_throughput"] == pytest.approx(21 / 4)
    assert found["total_token_throughput"] == pytest.approx(71 / 4)
    assert found["max_output_tokens_per_s"] == 10
    assert found["max_concurrent_requests"] == 2
    assert found["request_goodput"] is None
    assert found["ttfts"] == pytest.approx([0.1, 0.3, 0.1, 0.2, 0.05, 0, 0, 0])
    assert found["errors"] == [""] * 5 + ["HTTP 429: why"] * 2 + ["cut off: why"]
    assert [len(gaps) for gaps in found["itls"]] == [4, 4, 4, 4, 0, 0, 0, 0]


def test_time_per_output_token_excludes_outputs_of_one_token():
    measured = RunMeasurements(RUN, {})
    assert measured.distributions["tpot"].values == pytest.approx([10, 20, 50, 60])
    assert measured.distributions["ttft"].values == pytest.approx([50, 100, 100, 200, 300])
    assert len(measured.distributions["itl"].values) == 16


def test_an_event_with_several_tokens_counts_for_all_of_them():
    run = LoadRun([result(0.0, 0.5, [1.0] * 3, output_tokens=12)], start=0.0, end=4.0, cpu=0.0)
    assert RunMeasurements(run, {}).tokens_over_time() == [3, 3, 3, 3]
    assert RunMeasurements(run, {}).distributions["tpot"].values == pytest.approx([3000 / 11])


def test_statistics_equal_numpys():
    seconds = [random.Random(5).expovariate(3) for _ in range(501)]
    spread, values = Distribution.of(seconds), 1000 * np.array(seconds)
    for percent in (1, 25, 50, 90, 99, 99.9, 100):
        assert spread.at(percent) == pytest.approx(np.percentile(values, percent))
    assert (spread.mean, spread.median, spread.std) == pytest.approx((values.mean(), np.median(values), values.std()))
    assert percentile([], 50) == 0.0


def test_any_run_can_be_plotted():
    namespace = "{http://www.w3.org/2000/svg}"
    runs = [RUN, LoadRun([failed(0.0, "timeout")], 0.0, 0.5, 0.0), LoadRun([], 0.0, 0.0, 0.0)]
    runs.append(LoadRun([result(0.0, 0.0, [0.0] * 5)], 0.0, 900.0, 0.0))
    for run in runs:
        root = ElementTree.fromstring(plot(RunMeasurements(run, GOALS), "a <model> & more", "quickly"))
        assert root.find(f"{namespace}title").text == "a <model> & more"
        numbers = [
            float(number)
            for line in root.iter(f"{namespace}polyline")
            for point in line.get("points").split()
            for number in point.split(",")
        ]
        assert all(0 <= number <= 960 for number in numbers)
        assert numbers or not run.results


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:0", "speed:5", ":5", "ttft:nan"])
def test_an_invalid_limit_is_refused(word):
    with pytest.raises(ValidationError, match="--goodput takes milliseconds"):
        read_goals([word])


def test_limits():
    assert read_goals(["ttft:200", "tpot:50.5"]) == {"ttft": 200.0, "tpot": 50.5}
