"""`ServerMetrics`: what `/metrics` shows.

Counting is plain Python on plain numbers; Prometheus' own types are made when somebody looks, and not before. Nothing
is global: two servers in one process have figures of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from quire.config import EngineConfig
from quire.messages.histogram import Histogram
from quire.messages.pooling import PoolingParams
from quire.output.times import TokenTimes
from quire.router.router import ReplicaFigures
from quire.server.observability.engine_metrics import (
    PER_ENGINE,
    EngineMetrics,
    Labels,
    MeasuredReplica,
    MetricsSource,
    ReplicaMetrics,
    RestartCounter,
    Values,
)
from quire.server.observability.metric_table import (
    ALL_METRICS,
    BY_MODEL_LENGTH,
    ENGINE_METRICS,
    FINISH_REASONS,
    ROUTER_METRICS,
    MetricSpec,
    bounds_by_length,
)
from quire.server.observability.observer import ROUTINE_PATHS, GenerationRecord, HttpRecord

OURS = "quire:"
THEIRS = "vllm:"
METHODS = frozenset(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"))
HUNG_UP = 499
"""What stands for a status where the client did not wait for one."""
REQUEST_TYPES = {"/v1/chat/completions": "chat_completions", "/v1/responses": "responses"}
ENDED_WELL = ("stop", "length")
ALL_ENGINES = "all"
"""What stands for an engine, where there are several, in figures that are of requests and not of engines."""

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class MeasuredEngine(MetricsSource, Protocol):
    """What is looked at of the engine, or of all together; `AsyncLLM` has it."""

    config: EngineConfig

    @property
    def token_times(self) -> TokenTimes: ...


class RejectionCounter(Protocol):
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
        supervisor: RestartCounter | None = None,
        admission: RejectionCounter | None = None,
        replicas: Sequence[tuple[MeasuredReplica, RestartCounter]] = (),
        routing: Callable[[], Sequence[ReplicaFigures]] = tuple,
    ) -> None:
        """`vllm_names`: show every figure that vLLM has a second time under its prefix, for boards made for it.
        `replicas`: the engines, where there are several, each with its supervisor; `routing`: what the router knows."""
        self._llm = llm
        self._admission = admission
        self._prefixes = (OURS, THEIRS) if vllm_names else (OURS,)
        self._model_name = model_name
        self._engines = [EngineMetrics(llm, llm.config, supervisor)]
        if len(replicas) > 1:
            self._engines = [ReplicaMetrics(one, llm.config, keeper, routing) for one, keeper in replicas]
        by_length = bounds_by_length(llm.facts.max_model_len)
        self._bounds = {
            figure.name: by_length if figure.bounds == BY_MODEL_LENGTH else figure.bounds for figure in ALL_METRICS
        }
        self._counts: dict[str, dict[Labels, float]] = {
            "request_success": {(reason,): 0.0 for reason in FINISH_REASONS},
            "prompt_tokens_by_source": {("local_compute",): 0.0, ("local_cache_hit",): 0.0},
            "prompt_tokens": {(): 0.0},
            "prompt_tokens_cached": {(): 0.0},
        }
        self._tallies: dict[str, dict[Labels, Histogram]] = {
            figure.name: {} if figure.labels else {(): Histogram(self._bounds[figure.name])}
            for figure in ALL_METRICS
            if figure.kind == "histogram"
        }
        self.registry = CollectorRegistry()
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self.registry)
        self.registry.register(_Families(self))

    # What happens

    def on_submit(self, record: GenerationRecord) -> None:
        """A request goes to the engine, which will tell of it itself."""

    def on_first_output(self, record: GenerationRecord) -> None:
        """A request's prompt is done."""
        prompt, cached = record.prompt_tokens, record.cached_tokens
        self._count("prompt_tokens", prompt)
        self._count("prompt_tokens_cached", cached)
        self._count("prompt_tokens_by_source", prompt - cached, "local_compute")
        self._count("prompt_tokens_by_source", cached, "local_cache_hit")
        if (seconds := record.first_token_seconds) is not None:
            self._observe("time_to_first_token_seconds", seconds)

    def on_finish(self, record: GenerationRecord) -> None:
        """A request is over."""
        self._count("request_success", 1, record.reason)
        if record.reason in ENDED_WELL and record.metrics is not None:
            self._observe_whole(record)

    def on_http(self, record: HttpRecord) -> None:
        """An HTTP request has been answered."""
        method = record.method if record.method in METHODS else "other"
        status = record.status or HUNG_UP
        self._count("http_responses", 1, record.handler, method, str(status))
        if record.handler not in ROUTINE_PATHS:
            self._count("http_requests", 1, record.handler, method, f"{status // 100}xx")
            self._observe("http_request_duration_seconds", record.seconds, record.handler, method)
            self._observe("http_request_duration_highr_seconds", record.seconds)

    def on_tool_parse(self, is_streamed: bool, has_calls: bool, path: str) -> None:
        """An answer has been read for tool calls."""
        mode = "streaming" if is_streamed else "non_streaming"
        outcome = "tool_call" if has_calls else "no_tool_call"
        self._count("tool_call_parser_invocations", 1, mode, outcome, REQUEST_TYPES.get(path, "other"))

    def _observe_whole(self, record: GenerationRecord) -> None:
        """A request that ended by itself, seen from its end."""
        metrics = record.metrics
        assert metrics is not None
        tokens, decode = metrics.num_generation_tokens, metrics.last_token_ts - metrics.first_token_ts
        self._observe("e2e_request_latency_seconds", record.ended - record.arrived)
        self._observe("request_prompt_tokens", record.prompt_tokens)
        self._observe("request_prefill_kv_computed_tokens", record.prompt_tokens - record.cached_tokens)
        if metrics.scheduled_ts:
            self._observe("request_queue_time_seconds", max(0.0, metrics.queue_time))
        if isinstance(record.params, PoolingParams):
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
        self._observe("request_params_n", record.params.n)
        if record.params.max_tokens is not None:
            self._observe("request_params_max_tokens", record.params.max_tokens)

    def _count(self, name: str, value: float, *labels: str) -> None:
        counts = self._counts.setdefault(name, {})
        counts[labels] = counts.get(labels, 0.0) + value

    def _observe(self, name: str, value: float, *labels: str) -> None:
        tallies = self._tallies[name]
        tally = tallies.get(labels)
        if tally is None:
            tally = tallies[labels] = Histogram(self._bounds[name])
        tally.add(value)

    # What is shown

    async def page(self) -> bytes:
        """All figures in Prometheus' text format, at once: an engine that does not answer is not waited for long."""
        await asyncio.gather(*(engine.refresh() for engine in self._engines))
        return generate_latest(self.registry)

    def families(self) -> Iterator[Family]:
        """Every figure that can be shown now."""
        for figure in ALL_METRICS:
            if figure in ROUTER_METRICS and len(self._engines) == 1:
                continue  # there is no router
            if figure.is_bare:
                yield _family(figure.name, figure, [((), self._values(figure))])
                continue
            values = self._values_by_engine(figure)
            for prefix in self._prefixes:
                if prefix == OURS or not figure.is_ours:
                    yield _family(prefix + figure.name, figure, values)

    def _values_by_engine(self, figure: MetricSpec) -> list[tuple[Labels, Values]]:
        """A figure's values, by the labels that say whose they are."""
        if figure in ENGINE_METRICS or figure.name in PER_ENGINE:
            return [((self._model_name, str(i)), engine.values(figure)) for i, engine in enumerate(self._engines)]
        engine = "0" if len(self._engines) == 1 else ALL_ENGINES
        return [((self._model_name, engine), self._values(figure))]

    def _values(self, figure: MetricSpec) -> Values:
        """A figure's own labels, and its values by theirs."""
        if figure.kind == "histogram":
            if figure.name == "inter_token_latency_seconds":
                return (), {(): self._llm.token_times.gaps}
            return figure.labels, self._tallies[figure.name]
        return figure.labels, self._plain_values(figure.name)

    def _plain_values(self, name: str) -> dict[Labels, float]:
        match name:
            case "generation_tokens":
                return {(): self._llm.token_times.tokens}
            case "requests_rejected":
                return {} if self._admission is None else {(key,): n for key, n in self._admission.rejected.items()}
        return self._counts.get(name, {})


class _Families(Collector):
    """A server's figures, as a registry asks for them."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        return self._metrics.families()

    def describe(self) -> list[Family]:
        """Nothing: or the registry would look, at its making, when nothing has an answer yet."""
        return []


def _family(name: str, figure: MetricSpec, sources: Sequence[tuple[Labels, Values]]) -> Family:
    """A family for Prometheus. Sources share the labels; one that brings none has no part in it."""
    labels = next((labels for _, (labels, values) in sources if values), figure.labels)
    names = [*(("model_name", "engine") if sources[0][0] else ()), *labels]
    if figure.kind == "histogram":
        histogram = HistogramMetricFamily(name, figure.help, labels=names)
        for whose, (_, values) in sources:
            for given, tally in values.items():
                bounds = [*(str(float(bound)) for bound in tally.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(tally.counts), strict=True))
                histogram.add_metric([*whose, *given], buckets, tally.total)
        return histogram
    kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    family = kind(name, figure.help, labels=names)
    for whose, (_, values) in sources:
        for given, value in values.items():
            family.add_metric([*whose, *given], value)
    return family
