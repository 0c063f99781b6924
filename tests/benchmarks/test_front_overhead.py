"""The benchmark of the front end runs; how fast the front is depends on the machine, and is checked by `make soak`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.front_overhead import (
    engine_first_tokens,
    http_first_tokens,
    http_load,
    null_server,
    python_load,
)

STREAMS, TOKENS, PACE = 64, 40, 40.0


@pytest.fixture(scope="module")
def address(tiny_model: Path) -> Iterator[tuple[str, int, int]]:
    with null_server(PACE, str(tiny_model)) as address:
        yield address


def test_a_token_through_python_alone(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULL_ENGINE_PACE", "")  # put back afterwards: the benchmark sets it
    load = python_load(str(tiny_model), STREAMS, TOKENS, PACE)
    assert load.tokens == STREAMS * TOKENS >= load.events > load.tokens / 2


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_token_through_http(address: tuple[str, int, int], route: str) -> None:
    load = http_load(address, route, STREAMS, TOKENS)
    assert load.events > load.tokens / 2


def test_first_tokens_are_measured(
    address: tuple[str, int, int], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NULL_ENGINE_PACE", "")
    own = engine_first_tokens(str(tiny_model), 4, 5, PACE)
    through = http_first_tokens(address, "chat", 4, 5, TOKENS)
    assert own > 0 and through > 0


@pytest.mark.slow
def test_the_front_is_not_several_times_slower_than_it_was(
    address: tuple[str, int, int], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NULL_ENGINE_PACE", "")
    assert python_load(str(tiny_model), STREAMS, TOKENS, PACE).tokens_per_cpu_second > 15_000
    for route in ("chat", "completions"):
        assert http_load(address, route, STREAMS, TOKENS).tokens_per_cpu_second > 5_000
