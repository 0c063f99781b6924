"""What a server says about drafts: /metrics with vLLM's names, a request's log line and response, /admin/stats."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.stats import Metric
from quire.server.observability.logs import set_up
from quire.server.routes.admin import speculation_stats
from tests.server.conftest import Host, Live
from tests.server.scrape import Scrape

ADMIN = {"authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def drafting(tiny_model: Path) -> Iterator[Live]:
    """A server whose engine verifies n-gram drafts."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "tune": False}
    host = Host(tiny_model, speculative_config=speculation)
    live, stop = host.start(vllm_metric_names=True, admin_key="operator")
    yield live
    live.assert_idle()
    stop()
    host.close()


def ask(live: Live, **more: Any) -> dict[str, Any]:
    body = {"prompt": [5, 6, 7, 5, 6, 7], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = live.post("/v1/completions", {**body, **more}).raise_for_status().json()
    return answer


def stats(live: Live) -> dict[str, Any]:
    answer: dict[str, Any] = live.client.get("/admin/stats", headers=ADMIN).raise_for_status().json()
    return answer


def test_metrics_log_line_response_and_admin_agree(drafting: Live) -> None:
    stream = io.StringIO()
    set_up("json", "info", stream)
    metrics = ask(drafting, return_metrics=True)["metrics"]
    verified, accepted = metrics["draft_tokens"], metrics["accepted_tokens"]
    assert verified > accepted > 0
    stopped = ask(drafting, return_metrics=True, stop_token_ids=[7])["metrics"]
    drafting.assert_idle()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    logged = [line for line in lines if line["logger"] == "quire.access"]
    assert (logged[0]["draft_tokens"], logged[0]["accepted_tokens"]) == (verified, accepted)
    assert f"draft_tokens={verified} accepted_tokens={accepted}" in logged[0]["message"]
    verified += stopped.get("draft_tokens", 0)
    accepted += stopped.get("accepted_tokens", 0)

    scrape = Scrape(drafting.client.get("/metrics").text)
    for prefix in ("vllm:spec_decode_", "quire:spec_decode_"):
        assert scrape.sum(f"{prefix}num_draft_tokens_total", engine="0") == verified
        assert scrape.sum(f"{prefix}num_accepted_tokens_total", engine="0") == accepted
        assert scrape.sum(f"{prefix}num_accepted_tokens_per_pos_total") == accepted
        places = [scrape.sum(f"{prefix}num_accepted_tokens_per_pos_total", position=str(place)) for place in range(3)]
        assert sum(places) == accepted and places[0] >= places[1] >= places[2]
        assert verified / 3 <= scrape.sum(f"{prefix}num_drafts_total") <= verified
    assert "vllm:spec_decode_decodes_total" not in scrape.names, "vLLM has no such metric"
    assert "quire:spec_decode_drafts_per_decode" not in scrape.families, "there is no tuner"

    speculation = stats(drafting)["speculation"]
    assert (speculation["draft_tokens"], speculation["accepted_tokens"]) == (verified, accepted)
    assert speculation["accepted_by_position"] == places
    decodes = speculation["decodes_by_drafts"]
    assert len(decodes) == 4 and sum(drafts * count for drafts, count in enumerate(decodes)) >= verified
    assert speculation["tokens_per_draw"] == pytest.approx(1 + accepted / speculation["draws"])
    assert "tuner" not in speculation


CHAT = "/v1/chat/completions"
CHAT_BODY = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def details_of(live: Live, **more: Any) -> tuple[str, dict[str, Any]]:
    """The answer's text, and the details of its tokens; a streamed answer has the same."""
    response = live.post(CHAT, {**CHAT_BODY, **more})
    assert response.status_code == 200, response.text
    answer = response.json()
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    events = live.post(CHAT, {**CHAT_BODY, **more, **streaming}).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["usage"] | {"prompt_tokens_details": None} == answer[
        "usage"
    ] | {"prompt_tokens_details": None}
    return answer["choices"][0]["message"]["content"], answer["usage"].get("completion_tokens_details", {})


def test_a_prediction_is_used_for_drafts_and_counted(drafting: Live, live: Live) -> None:
    text, details = details_of(drafting)
    assert details == {}
    tokens = len(drafting.server.tokenizer.encode(text, add_special_tokens=False))
    before = stats(drafting)["speculation"]["accepted_tokens"]
    same, details = details_of(drafting, prediction={"type": "content", "content": text})
    assert same == text and details["accepted_prediction_tokens"] == tokens - details["rejected_prediction_tokens"] > 0
    assert stats(drafting)["speculation"]["accepted_tokens"] > before
    parts = [{"type": "text", "text": part} for part in (text[:5], text[5:], "@@@")]
    same, more = details_of(drafting, prediction={"type": "content", "content": parts})
    assert same == text and more["rejected_prediction_tokens"] == details["rejected_prediction_tokens"] + 3
    _, details = details_of(drafting, prediction={"type": "content", "content": "@" * 9}, n=2, temperature=1, seed=3)
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == 18
    # Without drafts it is accepted, and nothing is said about it.
    assert details_of(live, prediction={"type": "content", "content": text}) == (text, {})


@pytest.mark.parametrize("prediction", [
    "text", {"type": "content"}, {"type": "image", "content": "x"}, {"type": "content", "content": 3},
    {"type": "content", "content": [{"type": "text", "text": 3}]}, {"type": "content", "content": [{"type": "image"}]},
])  # fmt: skip
def test_what_is_no_prediction_is_refused(drafting: Live, prediction: Any) -> None:
    answer = drafting.post(CHAT, {**CHAT_BODY, "prediction": prediction})
    assert answer.status_code == 400 and "prediction" in answer.text


def test_without_drafts_nothing_is_shown(live: Live) -> None:
    assert "draft" not in json.dumps(ask(live, return_metrics=True)["metrics"])
    assert "spec_decode" not in live.client.get("/metrics").text


def test_the_tuner_in_admin_stats() -> None:
    def metric(name: str, value: float, *parts: float) -> Metric:
        return Metric(
            f"quire:spec_decode_{name}", "gauge", value, series=tuple(((str(i),), p) for i, p in enumerate(parts))
        )

    assert speculation_stats([Metric("quire:steps", "counter", 9)]) is None
    counted = [
        metric("num_drafts", 10), metric("num_draft_tokens", 20), metric("num_accepted_tokens", 15),
        metric("num_accepted_tokens_per_pos", 15, 9, 6), metric("decodes", 13, 3, 4, 6),
        Metric("quire:spec_decode_decodes_without_drafts", "counter", 3, series=((("unavailable",), 3.0),)),
    ]  # fmt: skip
    chosen = [
        metric("probes", 2), metric("drafts_per_decode", 1.5), metric("expected_tokens_per_decode", 2.2),
        metric("acceptance_rate", 0.9, 0.9, 0.7), metric("step_seconds", 0.01, 0.01, 0.011, 0.012),
        metric("draft_cost", 0.1), metric("proposal_cost", 0.02),
    ]  # fmt: skip
    plain = speculation_stats(counted)
    assert plain is not None and plain.tuner is None
    assert plain.tokens_per_draw == 2.5 and plain.accepted_by_position == [9, 6]
    assert plain.decodes_by_drafts == [3, 4, 6] and plain.decodes_without_drafts == {"unavailable": 3}
    tuned = speculation_stats([*counted, *chosen])
    assert tuned is not None and tuned.tuner is not None
    assert tuned.tuner.acceptance_by_position == [0.9, 0.7]
    assert tuned.tuner.step_ms_by_drafts == pytest.approx([10, 11, 12])
    assert (tuned.tuner.drafts_per_decode, tuned.tuner.expected_tokens_per_decode) == (1.5, 2.2)
    assert (tuned.tuner.draft_cost, tuned.tuner.proposal_cost, tuned.tuner.probes) == (0.1, 0.02, 2)
