"""Which engines pace prompts: those that stream from their own process, and those configured to. With real clocks:
marked slow."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from quire import EngineConfig
from quire.engine import setup
from quire.errors import ConfigError
from quire.scheduler.pacing import STREAM_STRETCH

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("settings", "usual", "stretch"),
    [
        ({}, math.inf, None),
        ({}, STREAM_STRETCH, STREAM_STRETCH),
        ({"max_step_stretch": 3}, STREAM_STRETCH, 3),
        ({"max_step_stretch": 3}, math.inf, 3),
        ({"max_step_stretch": math.inf}, STREAM_STRETCH, None),
        ({"enable_chunked_prefill": False}, STREAM_STRETCH, None),
    ],
    ids=["offline", "streams", "streams, told", "offline, told", "streams, told not to", "whole prompts"],
)
def test_which_engines_are_paced(settings: dict[str, float], usual: float, stretch: float | None) -> None:
    pacer = setup._pacer(EngineConfig(**settings), usual)
    assert (None if pacer is None else pacer.stretch) == stretch


@pytest.mark.parametrize("value", [1, 0.5, -1, math.nan, True, "2"])
def test_an_invalid_stretch_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="max_step_stretch must be a number above 1"):
        EngineConfig(max_step_stretch=value)  # type: ignore[arg-type]


def test_pacing_needs_chunked_prefill() -> None:
    with pytest.raises(ConfigError, match="enable_chunked_prefill=False"):
        EngineConfig(max_step_stretch=2, enable_chunked_prefill=False)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["pacing.py", "async_overhead.py"])
def test_the_default_model_meets_the_latency_target(script: str) -> None:
    """Gaps of streams beside 1,000-token prompts, and the cost of the process boundary: on an otherwise idle
    machine."""
    ran = subprocess.run([sys.executable, BENCHMARKS / script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
