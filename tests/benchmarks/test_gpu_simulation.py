"""The comparison of the simulator with a card: what it keeps when time is short or a part fails."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.simulation import METRICS, Deadline, Figures, Report, Run

SEEN = Figures(100.0, [10.0, 20.0], [1.0, 2.0], 5.0)


def test_what_would_not_end_in_time_does_not_begin(capsys: pytest.CaptureFixture[str]) -> None:
    deadline = Deadline(100.0, time.perf_counter() - 60.0)
    assert deadline.allows("a short load", 20.0)
    assert not deadline.allows("a long load", 39.0), "five seconds are kept for the end"
    assert capsys.readouterr().out == "left out: a long load: about 39 s, and 40 s are left\n"
    assert Deadline(math.inf, 0.0).allows("anything", 1e9)


def test_a_measured_load_is_reported_before_its_prediction() -> None:
    report = Report()
    report.add("loop", SEEN, None)
    assert report.to_json()[0]["predicted"] is None and "nan!" in report.lines()[1]
    report.predict("loop", Figures(150.0, [10.0, 20.0], [1.0, 2.0], 5.0))
    assert report.to_json()[0]["predicted"][METRICS[0]] == 150.0
    assert "1.50!" in report.lines()[1] and report.lines()[1].count("!") == 1


def test_a_part_that_fails_leaves_the_results_of_the_others(tmp_path: Path, capsys: Any) -> None:
    args = Namespace(
        small=True, output=str(tmp_path), limit=math.inf, model="none", profile="cpu-smollm2-135m", start_seconds=1.0,
        parts=["calibrate", "loads", "sweep"],
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        run = Run(args, pool)  # type: ignore[arg-type]
        run.part("loads", lambda: run.report.add("loop", SEEN, None))
        run.part("sweep", lambda: 1 // 0)
        run.part("unwanted", lambda: pytest.fail("it is not among the parts"))
    found = json.loads((tmp_path / "simulation.json").read_text())
    assert found["loads"][0]["measured"][METRICS[0]] == 100.0
    assert "ZeroDivisionError" in capsys.readouterr().err
