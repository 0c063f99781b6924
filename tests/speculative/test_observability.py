"""What an engine reports about drafts: counts, what the tuner chose, and from what; nothing if there are no drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.api.engine_group import merged_metrics
from quire.engine.stats import Metric, draft_metrics
from quire.messages.metric_table import SPECS, SPECULATION_METRICS
from quire.scheduler.draft_tuning import PLACES, Tuner
from tests.speculative.scripted import SCRIPTED, Scripted, Tally

PROMPTS = [{"prompt_token_ids": [7 + i, 9, 11, 13 + i]} for i in range(5)]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 40, "ignore_eos": True} | fields))


def named(metrics: list[Metric]) -> dict[str, Metric]:
    """Metrics of drafts by name, without what their names begin with."""
    prefix = "quire:spec_decode_"
    return {metric.name.removeprefix(prefix): metric for metric in metrics if metric.name.startswith(prefix)}


def series(metric: Metric) -> dict[str, float]:
    return {labels[0]: value for labels, value in metric.series}


def counts(outputs: list[RequestOutput]) -> tuple[int, int]:
    """Drafts verified and accepted, as the requests report them."""
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    assert len(metrics) == len(outputs)
    return sum(m.num_draft_tokens for m in metrics), sum(m.num_accepted_tokens for m in metrics)


@pytest.fixture
def expected(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[RequestOutput]:
    """Outputs without drafts, which the proposer knows then."""
    outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
    for name, value in (("book", []), ("wrong", 0.2), ("fails", 0.0)):
        monkeypatch.setattr(Scripted, name, value)
    Scripted.learn(outputs)
    return outputs


def test_without_drafts_nothing_is_reported(llm: LLM, expected: list[RequestOutput]) -> None:
    assert not named(llm.get_metrics())
    assert counts(expected) == (0, 0)
    assert llm.llm_engine.core.scheduler.drafting is None


@pytest.mark.parametrize("depth", [0, 1])
def test_counts_are_those_of_the_device_and_of_the_requests(
    make_llm: Callable[..., LLM], expected: list[RequestOutput], depth: int
) -> None:
    """Also if a stop string ends a request, which the engine learns of later."""
    llm = make_llm(speculative_config={**SCRIPTED, "num_speculative_tokens": 4}, pipeline_depth=depth)
    tally = Tally(llm)
    outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
    assert [list(one.outputs[0].token_ids) for one in outputs] == [list(one.outputs[0].token_ids) for one in expected]
    ends = [one.outputs[0].text[20:24] for one in expected]
    outputs += llm.generate(PROMPTS, [params(stop=[end]) for end in ends], use_tqdm=False)
    found = named(llm.get_metrics())
    verified, accepted = counts(outputs)
    assert found["num_draft_tokens"].value == pytest.approx(verified, abs=4 * len(PROMPTS) if depth else 0)
    assert found["num_accepted_tokens"].value == pytest.approx(accepted, abs=4 * len(PROMPTS) if depth else 0)
    if not depth:  # otherwise draws of rows that had ended are among those of the device
        assert (found["num_draft_tokens"].value, found["num_accepted_tokens"].value) == (tally.verified, tally.accepted)
    places = series(found["num_accepted_tokens_per_pos"])
    assert list(places) == ["0", "1", "2", "3"] and sum(places.values()) == found["num_accepted_tokens"].value > 50
    assert sorted(places.values(), reverse=True) == list(places.values())
    decodes = series(found["decodes"])
    assert list(decodes) == ["0", "1", "2", "3", "4"]
    assert sum(int(drafts) * count for drafts, count in decodes.items()) == tally.verified
    assert sum(count for drafts, count in decodes.items() if drafts != "0") >= found["num_drafts"].value
    assert set(series(found["decodes_without_drafts"])) == {"excluded", "unavailable", "unprofitable"}
    assert "probes" not in found, "there is no tuner"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_what_the_tuner_chose_and_from_what(make_llm: Callable[..., LLM], method: str) -> None:
    llm = make_llm(speculative_config={"method": method, "num_speculative_tokens": 3})
    for _ in range(3):
        llm.generate(PROMPTS[:1], params(max_tokens=150), use_tqdm=False)
    metrics = llm.get_metrics()
    found = named(metrics)
    assert {f"spec_decode_{name}" for name in found} == {spec.name for spec in SPECULATION_METRICS}
    assert all(metric.kind == SPECS[metric.name.partition(":")[2]].kind for metric in found.values())
    rates = series(found["acceptance_rate"])
    assert list(rates) == ["0", "1", "2"] and all(0 < rate < 1 for rate in rates.values())
    assert 1 <= found["expected_tokens_per_decode"].value <= 1 + found["drafts_per_decode"].value <= 4
    times = series(found["step_seconds"])
    assert list(times) == ["0", "1", "2", "3"] and all(0 < seconds < 10 for seconds in times.values())
    assert times["0"] == found["step_seconds"].value
    drafting = llm.llm_engine.core.scheduler.drafting
    assert drafting is not None and f"{found['num_draft_tokens'].value:.0f} verified" in drafting.describe()

    both = {metric.name: metric for metric in merged_metrics([metrics, metrics])}
    for name, one in found.items():
        merged = both[f"quire:spec_decode_{name}"]
        factor = 2 if one.kind == "counter" else 1
        assert merged.value == pytest.approx(factor * one.value)
        assert series(merged) == pytest.approx({label: factor * value for label, value in series(one).items()})


def test_an_engine_that_has_done_nothing_reports_no_times(make_llm: Callable[..., LLM]) -> None:
    drafting = make_llm(speculative_config={"method": "ngram"}).llm_engine.core.scheduler.drafting
    assert drafting is not None
    found = named(draft_metrics(drafting))
    assert "step_seconds" not in found and found["num_drafts"].value == found["drafts_per_decode"].value == 0
    assert found["expected_tokens_per_decode"].value == 1
    assert "not measured" in drafting.describe()


def test_a_choice_is_explained_by_what_was_measured() -> None:
    tuner = Tuner(rows=4, most=3)
    rows = np.arange(2)
    for _ in range(400):  # the first draft of row 0 is always right, of row 1 never
        tuner.note_draws(rows, np.array([2, 1]), np.array([1, 0]))
    for drafts, seconds in ((0, 0.010), (2, 0.012), (4, 0.016), (6, 0.030)):
        for _ in range(12):
            tuner.note_step(2, drafts, 0, seconds)
    choice = tuner.explain(rows, np.array([2, 1]), proposes=False)
    assert choice.drafts == 1.5
    assert choice.tokens == pytest.approx(1 + (1 + 0 + 0) / 2, abs=0.15)
    assert choice.acceptance[0] == pytest.approx(0.5, abs=0.02) and choice.acceptance[1] < 0.02
    assert len(choice.acceptance) == 3 < PLACES
    assert choice.seconds == pytest.approx([0.010, 0.012, 0.016, 0.030])
