"""`ServerMetrics`: what `/metrics` shows.

Counting is plain Python on plain numbers; Prometheus' own types are made when somebody looks, and not before. Nothing
is global: two servers in one process have figures of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from quire.config import EngineConfig
from quire.engine.facts import Facts
from quire.engine.stats import Metric
from quire.messages.pooling import PoolingParams
from quire.messages.tally import Tally
from quire.output.times import TokenTimes
from quire.server.seeing.engine_figures import EngineFigures
from quire.server.seeing.metric_table import (
    BY_LENGTH,
    ENGINE_FIGURES,
    FINISH_REASONS,
    TABLE,
    Figure,
    bounds_by_length,
)
from quire.server.seeing.observer import ASKED_BY_MACHINES, Generation, HttpRecord

OURS = "quire:"
THEIRS = "vllm:"
METHODS = frozenset(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"))
HUNG_UP = 499
"""What stands for a status where the client did not wait for one."""
REQUEST_TYPES = {"/v1/chat/completions": "chat_completions", "/v1/responses": "responses"}
ENDED_WELL = ("stop", "length")
GONE_WITH_ENGINE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_blocks_used")
"""Gauges that are zero where there is no engine."""

Labels = tuple[str, ...]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class MeasuredEngine(Protocol):
    """What is looked at of an engine; `AsyncLLM` has it."""

    config: EngineConfig

    @property
    def facts(self) -> Facts: ...

    @property
    def token_times(self) -> TokenTimes: ...

    @property
    def errored(self) -> bool: ...

    async def get_metrics(self) -> list[Metric]: ...


class Restarting(Protocol):
    """What counts restarts; `Supervisor` does."""

    restarts: int


class Refusing(Protocol):
    """What counts refusals by reason; `Admission` does."""

    @property
    def rejected(self) -> Mapping[str, int]: ...


class ServerMetrics:
    """Counts requests, and shows them with the engine's own figures."""

    def __init__(
        self,
        llm: MeasuredEngine,
        model_name: str,
        vllm_names: bool = False,
        supervisor: Restarting | None = None,
        admission: Refusing | None = None,
    ) -> None:
        """`vllm_names`: show every figure that vLLM has a second time under its prefix, for boards made for it."""
        self._llm = llm
        self._supervisor = supervisor
        self._admission = admission
        self._prefixes = (OURS, THEIRS) if vllm_names else (OURS,)
        self._model = (model_name, "0")
        self._engine = EngineFigures(llm.get_metrics)
        by_length = bounds_by_length(llm.facts.max_model_len)
        self._bounds = {figure.name: by_length if figure.bounds == BY_LENGTH else figure.bounds for figure in TABLE}
        self._counts: dict[str, dict[Labels, float]] = {
            "request_success": {(reason,): 0.0 for reason in FINISH_REASONS},
            "prompt_tokens_by_source": {("local_compute",): 0.0, ("local_cache_hit",): 0.0},
            "prompt_tokens": {(): 0.0},
            "prompt_tokens_cached": {(): 0.0},
        }
        self._tallies: dict[str, dict[Labels, Tally]] = {
            figure.name: {} if figure.labels else {(): Tally(self._bounds[figure.name])}
            for figure in TABLE
            if figure.kind == "histogram"
        }
        self.registry = CollectorRegistry()
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self.registry)
        self.registry.register(_Families(self))

    # What happens

    def on_submit(self, seen: Generation) -> None:
        """A request goes to the engine, which will tell of it itself."""

    def on_first_output(self, seen: Generation) -> None:
        """A request's prompt is done."""
        prompt, cached = seen.prompt_tokens, seen.cached_tokens
        self._count("prompt_tokens", prompt)
        self._count("prompt_tokens_cached", cached)
        self._count("prompt_tokens_by_source", prompt - cached, "local_compute")
        self._count("prompt_tokens_by_source", cached, "local_cache_hit")
        if (seconds := seen.first_token_seconds) is not None:
            self._observe("time_to_first_token_seconds", seconds)

    def on_finish(self, seen: Generation) -> None:
        """A request is over."""
        self._count("request_success", 1, seen.reason)
        if seen.reason in ENDED_WELL and seen.metrics is not None:
            self._observe_whole(seen)

    def on_http(self, record: HttpRecord) -> None:
        """An HTTP request has been answered."""
        method = record.method if record.method in METHODS else "other"
        status = record.status or HUNG_UP
        self._count("http_responses", 1, record.handler, method, str(status))
        if record.handler not in ASKED_BY_MACHINES:
            self._count("http_requests", 1, record.handler, method, f"{status // 100}xx")
            self._observe("http_request_duration_seconds", record.seconds, record.handler, method)
            self._observe("http_request_duration_highr_seconds", record.seconds)

    def on_tool_parse(self, is_streamed: bool, has_calls: bool, path: str) -> None:
        """An answer has been read for tool calls."""
        mode = "streaming" if is_streamed else "non_streaming"
        outcome = "tool_call" if has_calls else "no_tool_call"
        self._count("tool_call_parser_invocations", 1, mode, outcome, REQUEST_TYPES.get(path, "other"))

    def _observe_whole(self, seen: Generation) -> None:
        """A request that ended by itself, seen from its end."""
        metrics = seen.metrics
        assert metrics is not None
        tokens, decode = metrics.num_generation_tokens, metrics.last_token_ts - metrics.first_token_ts
        self._observe("e2e_request_latency_seconds", seen.ended - seen.arrived)
        self._observe("request_prompt_tokens", seen.prompt_tokens)
        self._observe("request_prefill_kv_computed_tokens", seen.prompt_tokens - seen.cached_tokens)
        if metrics.scheduled_ts:
            self._observe("request_queue_time_seconds", max(0.0, metrics.queue_time))
        if isinstance(seen.params, PoolingParams):
            return  # all else is about tokens, and it has none
        if metrics.scheduled_ts and metrics.first_token_ts:
            self._observe("request_inference_time_seconds", metrics.last_token_ts - metrics.scheduled_ts)
            self._observe("request_prefill_time_seconds", metrics.first_token_ts - metrics.scheduled_ts)
            self._observe("request_decode_time_seconds", decode)
        longest = metrics.max_num_generation_tokens
        if longest > 1:
            self._observe("request_time_per_output_token_seconds", decode / (longest - 1))
        self._observe("request_generation_tokens", tokens)
        self._observe("request_max_num_generation_tokens", longest)
        self._observe("request_params_n", seen.params.n)
        if seen.params.max_tokens is not None:
            self._observe("request_params_max_tokens", seen.params.max_tokens)

    def _count(self, name: str, value: float, *labels: str) -> None:
        counts = self._counts.setdefault(name, {})
        counts[labels] = counts.get(labels, 0.0) + value

    def _observe(self, name: str, value: float, *labels: str) -> None:
        tallies = self._tallies[name]
        tally = tallies.get(labels)
        if tally is None:
            tally = tallies[labels] = Tally(self._bounds[name])
        tally.add(value)

    # What is shown

    async def page(self) -> bytes:
        """All figures in Prometheus' text format, at once: an engine that does not answer is not waited for long."""
        await self._engine.refresh()
        return generate_latest(self.registry)

    def families(self) -> Iterator[Family]:
        """Every figure that can be shown now."""
        for figure in TABLE:
            labels, values = self._values(figure)
            if figure.is_bare:
                yield _family(figure.name, figure, labels, (), values)
                continue
            for prefix in self._prefixes:
                if prefix == OURS or not figure.is_ours:
                    yield _family(prefix + figure.name, figure, labels, self._model, values)

    def _values(self, figure: Figure) -> tuple[Sequence[str], dict[Labels, Any]]:
        """A figure's own labels, and its values by theirs."""
        name = figure.name
        if name == "cache_config_info":
            facts = self._cache_facts()
            return tuple(facts), {tuple(facts.values()): 1.0}
        if figure in ENGINE_FIGURES:
            return figure.labels, self._engine_values(figure)
        if figure.kind == "histogram":
            if name == "inter_token_latency_seconds":
                return (), {(): self._llm.token_times.gaps}
            return figure.labels, self._tallies[name]
        return figure.labels, self._plain_values(name)

    def _plain_values(self, name: str) -> dict[Labels, float]:
        match name:
            case "generation_tokens":
                return {(): self._llm.token_times.tokens}
            case "engine_up":
                return {(): 0.0 if self._llm.errored else 1.0}
            case "engine_restarts":
                return {(): 0 if self._supervisor is None else self._supervisor.restarts}
            case "requests_rejected":
                return {} if self._admission is None else {(key,): n for key, n in self._admission.rejected.items()}
        return self._counts.get(name, {})

    def _engine_values(self, figure: Figure) -> dict[Labels, Any]:
        known = self._engine.known
        if figure.name == "num_requests_waiting_by_reason":
            waiting = self._engine_value("num_requests_waiting")
            deferred = self._engine_value("num_requests_deferred")
            return {("capacity",): max(0.0, waiting - deferred), ("deferred",): deferred}
        metric = known.get(figure.name)
        if figure.labels:
            return {} if metric is None else dict(metric.series)
        if figure.kind != "histogram":
            return {(): self._engine_value(figure.name)}
        if metric is None:
            return {(): Tally(figure.bounds)}
        tally = Tally(metric.bounds)
        tally.counts, tally.total = list(metric.counts), metric.value
        return {(): tally}

    def _engine_value(self, name: str) -> float:
        metric = self._engine.known.get(name)
        return 0.0 if metric is None or (self._llm.errored and name in GONE_WITH_ENGINE) else metric.value

    def _cache_facts(self) -> dict[str, str]:
        facts, config = self._llm.facts, self._llm.config
        shown = {
            "block_size": facts.block_size,
            "num_gpu_blocks": facts.num_blocks,
            "kv_cache_size_tokens": facts.cache_tokens,
            "kv_cache_max_concurrency": round(facts.cache_tokens / facts.max_model_len, 2),
            "kv_cache_memory_bytes": facts.kv_bytes,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
        }
        return {name: str(value) for name, value in shown.items()}


class _Families(Collector):
    """A server's figures, as a registry asks for them."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        return self._metrics.families()

    def describe(self) -> list[Family]:
        """Nothing: or the registry would look, at its making, when nothing has an answer yet."""
        return []


def _family(name: str, figure: Figure, labels: Sequence[str], model: Labels, values: Mapping[Labels, Any]) -> Family:
    names = [*(("model_name", "engine") if model else ()), *labels]
    if figure.kind == "histogram":
        histogram = HistogramMetricFamily(name, figure.help, labels=names)
        for given, tally in values.items():
            bounds = [*(str(float(bound)) for bound in tally.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(tally.counts), strict=True))
            histogram.add_metric([*model, *given], buckets, tally.total)
        return histogram
    kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    family = kind(name, figure.help, labels=names)
    for given, value in values.items():
        family.add_metric([*model, *given], value)
    return family
