"""What `/metrics` shows: exact values, vLLM's names, and a prompt response whatever the engine does."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quire import SamplingParams
from quire.config import EngineConfig
from quire.engine.stats import Metric, expert_metrics
from quire.errors import EngineDeadError
from quire.messages.histogram import Histogram
from quire.messages.metric_table import ALL_METRICS, BY_MODEL_LENGTH, OPTIONAL_METRICS, bounds_by_length
from quire.messages.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.output.processor import TokenTimes
from quire.server.observability.metrics import ServerMetrics
from quire.server.observability.metrics_page import page
from quire.server.observability.observer import HttpRecord, Observer, current_record
from tests.server.conftest import Live
from tests.server.scrape import Scrape

ROOT = Path(__file__).parents[2]


@dataclass
class FakeEngine:
    """Returns the metrics that a test sets."""

    metrics: list[Metric] = field(default_factory=list)
    token_times: TokenTimes = field(default_factory=TokenTimes)
    num_resumed: int = 0
    errored: bool = False
    delay: float = 0.0
    questions: int = 0
    config: EngineConfig = field(default_factory=EngineConfig)
    info: Any = field(
        default_factory=lambda: SimpleNamespace(
            max_model_len=1000, block_size=16, num_blocks=125, cache_tokens=2000, kv_bytes=4096
        )
    )

    async def get_metrics(self) -> list[Metric]:
        self.questions += 1
        await asyncio.sleep(self.delay)
        if self.errored:
            raise EngineDeadError("gone")
        return self.metrics


@dataclass
class FakeReplica(FakeEngine):
    """One of several replicas."""

    number: int = 0
    router_feed: Any = None


def look(metrics: ServerMetrics) -> Scrape:
    return Scrape(asyncio.run(metrics.page()).decode())


def output(prompt: int, tokens: int, reason: str | None = "stop", cached: int = 0, **times: float) -> RequestOutput:
    metrics = RequestMetrics(arrival_time=0.0, num_generation_tokens=tokens, max_num_generation_tokens=tokens, **times)  # type: ignore[arg-type]
    sample = CompletionOutput(0, "", list(range(tokens)), finish_reason=reason)
    return RequestOutput(
        "r", None, [1] * prompt, [sample], reason is not None, metrics=metrics, num_cached_tokens=cached
    )


def test_a_finished_request_is_counted_in_every_metric_with_its_own_times() -> None:
    metrics = ServerMetrics(FakeEngine(), "m")
    current_record.set(HttpRecord("id", "POST", "/v1/completions", "none", arrived=100.0))
    seen = Observer(metrics).on_submit("r", SamplingParams(n=1, max_tokens=50))
    current_record.set(None)
    times = {"queued_ts": 100.5, "scheduled_ts": 102.5, "first_token_ts": 103.0, "last_token_ts": 103.75}
    seen.on_output(output(12, 4, cached=8, **times))
    seen.on_finish()
    scrape = look(metrics)
    expected = {
        "time_to_first_token_seconds": 3.0,
        "request_queue_time_seconds": 2.0,
        "request_inference_time_seconds": 1.25,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 0.75,
        "request_time_per_output_token_seconds": 0.25,
        "e2e_request_latency_seconds": seen.ended - 100.0,
        "request_prompt_tokens": 12,
        "request_prefill_kv_computed_tokens": 4,
        "request_generation_tokens": 4,
        "request_max_num_generation_tokens": 4,
        "request_params_n": 1,
        "request_params_max_tokens": 50,
    }
    for name, value in expected.items():
        assert scrape.sum(f"quire:{name}_count", model_name="m", engine="0") == 1, name
        assert scrape.sum(f"quire:{name}_sum") == pytest.approx(value), name
    assert scrape.sum("quire:prompt_tokens_total") == 12
    assert scrape.sum("quire:prompt_tokens_cached_total") == 8
    assert scrape.sum("quire:prompt_tokens_by_source_total", source="local_compute") == 4
    assert scrape.sum("quire:prompt_tokens_by_source_total", source="local_cache_hit") == 8
    assert scrape.sum("quire:request_success_total", finished_reason="stop") == 1
    assert scrape.sum("quire:request_success_total") == 1
    assert scrape.buckets("quire:request_decode_time_seconds")["0.5"] == 0
    assert scrape.buckets("quire:request_decode_time_seconds")["0.8"] == 1


@pytest.mark.parametrize(
    ("last", "reason", "counted"),
    [
        (output(3, 2, reason=None), None, "abort"),
        (None, None, "abort"),
        (None, "error", "error"),
        (output(3, 2, reason="length"), None, "length"),
        (output(3, 2, reason="error"), None, "error"),
    ],
)
def test_every_request_is_counted_once_with_one_finish_reason(
    last: RequestOutput | None, reason: str | None, counted: str
) -> None:
    metrics = ServerMetrics(FakeEngine(), "m")
    seen = Observer(metrics).on_submit("r", SamplingParams())
    if last is not None:
        seen.on_output(last)
    seen.on_finish(reason)
    seen.on_finish()
    scrape = look(metrics)
    assert scrape.sum("quire:request_success_total", finished_reason=counted) == 1
    assert scrape.sum("quire:request_success_total") == 1
    # A request that did not finish by itself says nothing about how long requests take.
    assert scrape.sum("quire:e2e_request_latency_seconds_count") == (counted == "length")


def test_a_histogram_counts_like_the_prometheus_client() -> None:
    from prometheus_client import CollectorRegistry
    from prometheus_client import Histogram as PrometheusHistogram

    bounds = (0.1, 0.5, 1.0)
    registry = CollectorRegistry()
    theirs, ours = PrometheusHistogram("h", "", buckets=bounds, registry=registry), Histogram(bounds)
    for value in (0.05, 0.1, 0.10001, 0.5, 0.7, 1.0, 1.5, 80.0):
        theirs.observe(value)
        ours.add(value)
    total, expected = 0, []
    for bound, count in zip(("0.1", "0.5", "1.0", "+Inf"), ours.counts, strict=True):
        total += count
        expected.append((bound, total))
    assert [(b, registry.get_sample_value("h_bucket", {"le": b})) for b, _ in expected] == expected
    assert ours.total == registry.get_sample_value("h_sum")
    assert ours.count == registry.get_sample_value("h_count")


def test_there_is_one_gap_fewer_than_tokens_however_they_arrive() -> None:
    times = TokenTimes()
    times.note(1, 10.0, 0.0)
    times.note(1, 10.02, 10.0)
    times.note(4, 10.1, 10.02)  # several at once share the time
    times.note(3, 20.0, 0.0)  # another sequence's first
    times.note_whole(11, 2.0)
    times.note_whole(1, 0.0)
    assert times.tokens == 1 + 1 + 4 + 3 + 11 + 1
    assert times.gaps.count == 5 + 2 + 10
    assert times.gaps.total == pytest.approx(0.1 + 2.0)


def test_vllm_names_are_a_setting_and_two_servers_do_not_clash() -> None:
    engine = FakeEngine(
        [Metric("quire:iteration_tokens_total", "histogram", 7.0, (1.0, 8.0), (1, 1, 0)),
         Metric("quire:num_requests_waiting", "gauge", 3.0), Metric("quire:num_requests_deferred", "gauge", 1.0)]
    )  # fmt: skip
    plain, both = look(ServerMetrics(engine, "a")), look(ServerMetrics(engine, "b", vllm_names=True))
    assert not any(name.startswith("vllm:") for name in plain.names)
    ours = {(name[6:], has) for name, has in both.values if name.startswith("quire:")}
    theirs = {(name[5:], has) for name, has in both.values if name.startswith("vllm:")}
    assert theirs < ours
    must = {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
        "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
        "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
        "iteration_tokens_total_count", "cache_config_info",
    }  # fmt: skip
    assert must <= {name for name, _ in theirs}
    assert both.sum("vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert both.sum("vllm:num_requests_waiting_by_reason", reason="deferred") == 1
    assert both.buckets("vllm:iteration_tokens_total") == {"1.0": 1, "8.0": 2, "+Inf": 2}
    assert list(both.buckets("vllm:time_to_first_token_seconds"))[:3] == ["0.001", "0.005", "0.01"]
    assert list(both.buckets("vllm:time_to_first_token_seconds"))[-2:] == ["2560.0", "+Inf"]
    assert next(iter(both.buckets("vllm:e2e_request_latency_seconds"))) == "0.3"
    assert list(both.buckets("vllm:inter_token_latency_seconds"))[-2:] == ["80.0", "+Inf"]
    assert list(both.buckets("vllm:request_params_n")) == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]
    assert both.sum("vllm:cache_config_info", block_size="16", num_gpu_blocks="125", kv_cache_size_tokens="2000") == 1


def test_buckets_follow_the_models_length() -> None:
    assert bounds_by_length(300) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert bounds_by_length(1000)[-2:] == (500, 1000)


def test_expert_load_is_shown_per_layer_and_not_per_expert() -> None:
    figures = expert_metrics({0: [3, 1], 2: [2, 2]})
    seen = look(ServerMetrics(FakeEngine(figures), "m"))
    assert seen.sum("quire:expert_tokens_total") == 8
    assert seen.sum("quire:expert_load_max_over_mean", layer="0") == 1.5
    assert seen.sum("quire:expert_load_max_over_mean") == 2.5


def test_a_busy_engine_is_waited_for_one_second_and_queried_once() -> None:
    engine = FakeEngine([Metric("quire:num_requests_running", "gauge", 5.0)])
    metrics = ServerMetrics(engine, "m")

    async def work() -> None:
        await metrics.page()
        engine.delay, engine.metrics = 30.0, []
        begin = time.monotonic()
        pages = await asyncio.gather(*(metrics.page() for _ in range(5)))
        assert 0.9 < time.monotonic() - begin < 3.0
        assert all(Scrape(each.decode()).sum("quire:num_requests_running") == 5.0 for each in pages)
        assert engine.questions == 2

    asyncio.run(work())


def test_a_dead_engine_runs_nothing_and_its_counters_stay() -> None:
    engine = FakeEngine(
        [Metric("quire:num_requests_running", "gauge", 5.0), Metric("quire:num_preemptions", "counter", 2.0)]
    )
    supervisor, admission = SimpleNamespace(restarts=3), SimpleNamespace(rejected={"requests": 4, "tokens": 0})
    metrics = ServerMetrics(engine, "m", supervisor=supervisor, admission=admission)
    assert look(metrics).sum("quire:engine_up") == 1
    engine.errored = True
    scrape = look(metrics)
    assert scrape.sum("quire:engine_up") == 0
    assert scrape.sum("quire:num_requests_running") == 0
    assert scrape.sum("quire:num_preemptions_total") == 2
    assert scrape.sum("quire:engine_restarts_total") == 3
    assert scrape.sum("quire:requests_rejected_total", reason="requests") == 4


def test_http_requests_are_counted_by_route_and_not_by_client_input() -> None:
    metrics = ServerMetrics(FakeEngine(), "m")
    for method, handler, status in (
        ("POST", "/v1/completions", 200), ("POST", "/v1/completions", 429), ("POST", "/v1/completions", 0),
        ("GET", "/health", 503), ("GRAB", "none", 404),
    ):  # fmt: skip
        metrics.on_http(HttpRecord("id", method, "/any", handler, arrived=1.0, ended=1.25, status=status))
    scrape = look(metrics)
    assert scrape.sum("http_requests_total", handler="/v1/completions", status="2xx") == 1
    assert scrape.sum("http_requests_total", handler="/v1/completions", status="4xx") == 2
    assert scrape.sum("quire:http_responses_total", handler="/v1/completions", status="499") == 1
    assert scrape.sum("quire:http_responses_total", handler="/health", status="503") == 1
    assert scrape.sum("http_requests_total", method="other", handler="none", status="4xx") == 1
    assert scrape.sum("http_request_duration_seconds_count") == 4  # health checks and scrapes are left out
    assert scrape.sum("http_request_duration_highr_seconds_sum") == pytest.approx(4 * 0.25)


def test_tool_calls_are_counted_with_vllms_labels() -> None:
    metrics = ServerMetrics(FakeEngine(), "m", vllm_names=True)
    metrics.on_tool_parse(True, True, "/v1/chat/completions")
    metrics.on_tool_parse(False, False, "/v1/messages")
    scrape = look(metrics)
    name = "vllm:tool_call_parser_invocations_total"
    assert scrape.sum(name, mode="streaming", outcome="tool_call", request_type="chat_completions") == 1
    assert scrape.sum(name, mode="non_streaming", outcome="no_tool_call", request_type="other") == 1


def test_counting_a_token_is_cheap() -> None:
    times = TokenTimes()
    seen = Observer(ServerMetrics(FakeEngine(), "m")).on_submit("r", SamplingParams())
    shown = output(1, 1, reason=None)
    seen.on_output(shown)
    count, best = 20_000, 1.0
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(count):
            times.note(1, 1.03, 1.0)
            seen.on_output(shown)
        best = min(best, (time.thread_time() - begin) / count)
    assert best < 2e-6, f"{best * 1e6:.2f} µs"


# A live server


def scrape_of(live: Live) -> Scrape:
    response = live.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scrape(response.text)


def ask(live: Live, **body: Any) -> httpx.Response:
    return live.post(
        "/v1/completions",
        {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "cache_salt": "m", **body},
    )


def test_sequential_requests_give_exact_token_counts(serving: Callable[..., Live]) -> None:
    live = serving()
    before = scrape_of(live)
    for stream in (False, True, False):
        assert ask(live, stream=stream).status_code == 200
    assert ask(live, n=2, max_tokens=4, temperature=1, seed=1).status_code == 200
    after = scrape_of(live)

    def gained(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    # The engine's metrics cover all servers it has had: only the increase counts.
    assert gained("vllm:inter_token_latency_seconds_count") == 3 * 5 + 2 * 3
    assert gained("vllm:iteration_tokens_total_count") == 3 * 6 + 4
    assert gained("vllm:iteration_tokens_total_sum") == 3 * (3 + 6) + 3 + 2 * 4
    assert gained("quire:step_tokens_count") == 3 * 6 + 4
    assert gained("quire:step_tokens_sum") == 3 * (3 + 5) + 3 + 2 * 3
    assert gained("vllm:generation_tokens_total") == 3 * 6 + 2 * 4
    assert gained("vllm:prompt_tokens_total") == 4 * 3
    assert gained("vllm:time_to_first_token_seconds_count") == 4
    assert gained("vllm:e2e_request_latency_seconds_count") == 4
    assert gained("vllm:request_success_total", finished_reason="length") == 4
    assert gained("vllm:request_generation_tokens_sum") == 3 * 6 + 8
    assert gained("vllm:request_max_num_generation_tokens_sum") == 3 * 6 + 4
    assert gained("vllm:request_params_n_sum") == 3 + 2
    assert (gained("vllm:request_num_preemptions_count"), gained("vllm:request_num_preemptions_sum")) == (4, 0)
    assert after.sum("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 0
    assert after.sum("http_requests_total", handler="/v1/completions", status="2xx") == 4
    assert after.sum("vllm:num_requests_running") == after.sum("vllm:num_requests_waiting") == 0
    assert 0 <= gained("vllm:inter_token_latency_seconds_sum") < gained("vllm:e2e_request_latency_seconds_sum") * 2
    parts = [after.sum(f"vllm:request_{part}_time_seconds_sum") for part in ("prefill", "decode", "inference")]
    assert parts[0] + parts[1] == pytest.approx(parts[2])


def test_vllms_names_can_be_left_out(serving: Callable[..., Live]) -> None:
    page = serving(vllm_metric_names=False).client.get("/metrics").text
    assert "quire:num_requests_running" in page
    assert "vllm:" not in page


def test_errors_disconnects_and_unknown_paths_are_counted(serving: Callable[..., Live]) -> None:
    live = serving()
    assert ask(live, max_tokens="many").status_code == 400
    assert live.client.get("/v1/models/none-of-ours").status_code == 404
    assert live.client.get("/what/ever").status_code == 404
    with live.client.stream(
        "POST", "/v1/completions", json={"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "stream": True}
    ) as response:
        next(response.iter_lines())
    live.assert_idle()
    deadline = time.monotonic() + 5
    while (scrape := scrape_of(live)).sum("quire:request_success_total", finished_reason="abort") < 1:
        assert time.monotonic() < deadline
    assert scrape.sum("quire:http_responses_total", handler="/v1/completions", status="400") == 1
    assert scrape.sum("quire:http_responses_total", handler="none", status="404") == 1
    handlers = {dict(has).get("handler") for _, has in scrape.values}
    assert "/what/ever" not in handlers and not any("none-of-ours" in str(handler) for handler in handlers)


def test_a_preempted_request_reports_it_even_if_a_stop_string_ends_it(tiny_model: Path) -> None:
    from quire import LLM

    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 120}
    prompts = [{"prompt_token_ids": [20 + i, 21, 22, 23]} for i in range(6)]
    with LLM(str(tiny_model), dtype="float32", num_gpu_blocks_override=16, device="cpu") as llm:
        whole: list[RequestOutput] = llm.generate(prompts, SamplingParams(**fields), use_tqdm=False)
        lost = [i for i, output in enumerate(whole) if output.metrics and output.metrics.preemptions]
        assert lost, "the cache is small enough for preemptions"
        ends = [output.outputs[0].text[-4:] for output in whole]
        stopped = llm.generate(prompts, [SamplingParams(**fields, stop=[end]) for end in ends], use_tqdm=False)
        total = llm.llm_engine.core.scheduler.stats.preemptions
    assert all(output.outputs[0].finish_reason == "stop" for output in stopped)
    counts = [output.metrics.preemptions for output in [*whole, *stopped] if output.metrics is not None]
    assert sum(counts) == total
    assert any(counts[len(whole) :])


def test_a_response_has_its_own_metrics_on_request(serving: Callable[..., Live]) -> None:
    live = serving()
    asked = ask(live, max_tokens=9, n=2, temperature=1, seed=1, return_metrics=True).json()["metrics"]
    assert asked["preemptions"] == 0
    assert 0 <= asked["queue_time_ms"] <= asked["time_to_first_token_ms"]
    assert asked["mean_itl_ms"] == pytest.approx(asked["generation_time_ms"] / 8, abs=0.01)  # a sequence's nine tokens
    assert asked["tokens_per_second"] == pytest.approx(17_000 / asked["generation_time_ms"], rel=0.01)
    assert "metrics" not in ask(live).json()


# The page of the documentation


def test_the_metrics_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), "run make docs"


def test_the_metrics_page_lists_exactly_the_exported_families() -> None:
    drafts = [
        Metric(f"quire:{spec.name}", spec.kind, 1.0, series=((("0",) * len(spec.labels), 1.0),) if spec.labels else ())
        for spec in OPTIONAL_METRICS
    ]
    replicas = [(FakeReplica(drafts, number=number), SimpleNamespace(restarts=0)) for number in range(2)]
    shown = look(ServerMetrics(FakeEngine(), "m", replicas=replicas)).families
    alone = look(ServerMetrics(FakeEngine(), "m")).families
    optional = {prefix + spec.name for spec in OPTIONAL_METRICS for prefix in ("quire:", "vllm:")}
    assert set(alone) == {name for name in shown if "router" not in name and name not in optional} != set(shown)
    families = {name for name in shown if not name.startswith(("process_", "python_"))}
    documented = re.findall(r"^\| `([^`]+)` \| (\w+)", page(), re.MULTILINE)
    assert {name.removesuffix("_total") if kind == "counter" else name for name, kind in documented} == families
    for name, kind in documented:
        assert shown[name.removesuffix("_total") if kind == "counter" else name].type == kind
    assert all(figure.bounds for figure in ALL_METRICS if figure.kind == "histogram")
    assert any(figure.bounds == BY_MODEL_LENGTH for figure in ALL_METRICS)


def test_a_scrape_is_answered_while_the_event_loop_is_busy(serving: Callable[..., Live]) -> None:
    live = serving()
    threads = [threading.Thread(target=ask, args=(live,), kwargs={"max_tokens": 60}) for _ in range(8)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    scrape_of(live)
    assert time.monotonic() - begin < 3
    for thread in threads:
        thread.join()
    live.assert_idle()
