"""What the benchmarks report about drafts."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli.bench.speculation import (
    DraftCounts,
    add_speculation,
    speculation_metrics,
    speculation_rows,
    with_synthetic,
    without_drafts,
)
from quire.config import EngineConfig
from quire.engine.stats import Metric


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_speculation(parser)
    return parser.parse_args(arguments)


def engine(draws: int, drafts: int, *accepted: int) -> Any:
    series = tuple(((str(place),), float(count)) for place, count in reversed(list(enumerate(accepted))))
    metrics = [
        Metric("quire:spec_decode_num_drafts", "counter", draws),
        Metric("quire:spec_decode_num_draft_tokens", "counter", drafts),
        Metric("quire:spec_decode_num_accepted_tokens_per_pos", "counter", sum(accepted), series=series),
    ]
    return SimpleNamespace(get_metrics=lambda: metrics)


def test_acceptance_by_position_and_length() -> None:
    found = DraftCounts.of(engine(110, 330, 85, 44, 20, 0)).since(DraftCounts.of(engine(10, 30, 5, 4, 0, 0)))
    assert found.rates == [0.8, 0.4, 0.2]
    assert found.length == pytest.approx(2.4)
    assert speculation_rows(found, 1.7) == [
        ("drafts", "2.40 tokens a verifying step, 47% of drafts accepted"),
        ("by position", "0.80 0.40 0.20"),
        ("against none", "1.70 times as fast"),
    ]
    assert speculation_metrics(found, None)["spec_decode_acceptance_length"] == pytest.approx(2.4)


def test_without_drafts_nothing_is_reported() -> None:
    found = DraftCounts.of(SimpleNamespace(get_metrics=list))  # type: ignore[arg-type]
    assert speculation_rows(found.since(found), None) == []
    assert speculation_metrics(found, None) == {}


def test_synthetic_acceptance_is_a_speculative_config() -> None:
    rates = parse("--synthetic-acceptance", "0.8,0.6").synthetic_acceptance
    settings = with_synthetic({"speculative_config": {"method": "suffix"}}, rates)
    speculation = EngineConfig(**settings).speculation
    assert speculation is not None
    assert (speculation.method, speculation.most_drafts) == ("suffix", 2)
    assert speculation.acceptance_rates == pytest.approx((0.8, 0.75))
    assert with_synthetic({}, rates)["speculative_config"]["method"] == "ngram"
    assert with_synthetic({"seed": 1}, None) == {"seed": 1}
    with pytest.raises(SystemExit):
        parse("--synthetic-acceptance", "high")


def test_what_speculation_is_compared_with() -> None:
    settings = {"seed": 1, "speculative_config": {"method": "ngram"}}
    assert without_drafts(settings, parse()) == {"seed": 1, "speculative_config": None}
    assert without_drafts(settings, parse("--no-baseline")) is None
    assert without_drafts({"seed": 1}, parse()) is None
