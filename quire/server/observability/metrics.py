"""`ServerMetrics`: what `/metrics` shows.

Counting uses plain Python numbers; Prometheus' types are made only when the page is read. Nothing is global: two
servers in one process have separate metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from quire.config import EngineConfig
from quire.messages.histogram import Histogram
from quire.messages.metric_table import (
    ALL_METRICS,
    BY_MODEL_LENGTH,
    ENGINE_METRICS,
    OPTIONAL_METRICS,
    ROUTER_METRICS,
    MetricSpec,
    bounds_by_length,
)
from quire.messages.pooling import PoolingParams
from quire.output.processor import TokenTimes
from quire.router.router import ReplicaLoadStats
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
from quire.server.observability.observer import ROUTINE_PATHS, GenerationRecord, HttpRecord
from quire.server.observability.snapshots import HistogramCounts, MetricsSnapshot, with_counts, with_histograms

OURS = "quire:"
THEIRS = "vllm:"
METHODS = frozenset(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"))
CLIENT_DISCONNECTED = 499
"""Status recorded if the client disconnected before there was one."""
REQUEST_TYPES = {"/v1/chat/completions": "chat_completions", "/v1/responses": "responses"}
MOST_ADAPTER_LABELS = 256
"""Adapters that are counted separately."""
MOST_FIELD_LABELS = 64
"""Names of ignored fields that are counted separately."""
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""vLLM's; the last stays zero: KV does not come from other servers."""
ENDED_WELL = ("stop", "length")
GAPS = "inter_token_latency_seconds"
ENGINE_HISTOGRAMS = frozenset(spec.name for spec in ENGINE_METRICS if spec.kind == "histogram")
ALL_ENGINES = "all"
"""The `engine` label of request metrics if there are several engines."""

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class MeasuredEngine(MetricsSource, Protocol):
    """The engine, or all engines together; `AsyncLLM` implements it."""

    config: EngineConfig

    @property
    def token_times(self) -> TokenTimes: ...

    @property
    def num_resumed(self) -> int: ...


class RejectionCounter(Protocol):
    """Counts rejected requests by reason; `AdmissionLimiter` does."""

    @property
    def rejected(self) -> Mapping[str, int]: ...


class StoreMeter(Protocol):
    """Measures what is stored; `StoredResponses` does."""

    def measure(self, name: str) -> Mapping[Labels, float]:
        """The values of one of its metrics."""


class MediaMeter(Protocol):
    """Counts images that were decoded and refused; `MediaCounts` does."""

    def measure(self, name: str) -> Mapping[Labels, float]:
        """The values of one of its metrics."""


MEDIA_METRICS = ("media_items", "media_bytes", "media_pixels", "media_seconds", "media_refused")
STORE_METRICS = ("stored_response_bytes", "stored_responses_dropped", "background_responses")


class ServerMetrics:
    """Counts requests, and shows them together with the engine's own metrics."""

    def __init__(
        self,
        llm: MeasuredEngine,
        model_name: str,
        vllm_names: bool = False,
        supervisor: RestartCounter | None = None,
        admission: RejectionCounter | None = None,
        replicas: Sequence[tuple[MeasuredReplica, RestartCounter]] = (),
        routing: Callable[[], Sequence[ReplicaLoadStats]] = tuple,
        stored: StoreMeter | None = None,
        media: MediaMeter | None = None,
    ) -> None:
        """`vllm_names`: show every metric that vLLM has also under vLLM's prefix, for dashboards made for it.
        `replicas`: the engines, if there are several, each with its supervisor; `routing`: the router's estimates."""
        self._llm = llm
        self._admission = admission
        self._stored = stored
        self._media = media
        self._prefixes = (OURS, THEIRS) if vllm_names else (OURS,)
        self._model_name = model_name
        self._engines = [EngineMetrics(llm, llm.config, supervisor)]
        if len(replicas) > 1:
            self._engines = [ReplicaMetrics(one, llm.config, supervisor, routing) for one, supervisor in replicas]
        by_length = bounds_by_length(llm.info.max_model_len)
        self._bounds = {spec.name: by_length if spec.bounds == BY_MODEL_LENGTH else spec.bounds for spec in ALL_METRICS}
        self._counts: dict[str, dict[Labels, float]] = {
            "request_success": {(reason,): 0.0 for reason in FINISH_REASONS},
            "prompt_tokens_by_source": {(source,): 0.0 for source in PROMPT_SOURCES},
            "prompt_tokens": {(): 0.0},
            "prompt_tokens_cached": {(): 0.0},
        }
        self._histograms: dict[str, dict[Labels, Histogram]] = {
            spec.name: {} if spec.labels else {(): Histogram(self._bounds[spec.name])}
            for spec in ALL_METRICS
            if spec.kind == "histogram"
        }
        self.gather_fronts: Callable[[], Awaitable[MetricsSnapshot]] | None = None
        """Gets what other fronts have counted, if there are several."""
        self._fronts = MetricsSnapshot()
        self.registry = CollectorRegistry()
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self.registry)
        self.registry.register(_Families(self))

    # Events

    def on_submit(self, record: GenerationRecord) -> None:
        """The engine's own metrics count submitted requests."""

    def on_first_output(self, record: GenerationRecord) -> None:
        """A request's prompt has been computed."""
        prompt, cached = record.prompt_tokens, record.cached_tokens
        self._count("prompt_tokens", prompt)
        self._count("prompt_tokens_cached", cached)
        self._count("prompt_tokens_by_source", prompt - cached, "local_compute")
        self._count("prompt_tokens_by_source", cached, "local_cache_hit")
        if record.image_tokens:
            self._count("prompt_tokens_image", record.image_tokens)
        if (seconds := record.first_token_seconds) is not None:
            self._observe("time_to_first_token_seconds", seconds)

    def on_finish(self, record: GenerationRecord) -> None:
        """A request has ended."""
        self._count("request_success", 1, record.reason)
        if record.adapter:
            label = self._adapter_label(record.adapter)
            self._count("adapter_requests", 1, label)
            self._count("adapter_prompt_tokens", record.prompt_tokens, label)
            self._count("adapter_generation_tokens", record.output_tokens, label)
        if record.reason in ENDED_WELL and record.metrics is not None:
            self._observe_whole(record)

    def on_http(self, record: HttpRecord) -> None:
        """An HTTP request has been answered."""
        method = record.method if record.method in METHODS else "other"
        status = record.status or CLIENT_DISCONNECTED
        self._count("http_responses", 1, record.handler, method, str(status))
        for name in record.ignored:
            self._count("request_fields_ignored", 1, self._field_label(name))
        if record.handler not in ROUTINE_PATHS:
            self._count("http_requests", 1, record.handler, method, f"{status // 100}xx")
            self._observe("http_request_duration_seconds", record.seconds, record.handler, method)
            self._observe("http_request_duration_highr_seconds", record.seconds)

    def _adapter_label(self, name: str) -> str:
        """The adapter's name, while there are few: thousands of series would be too many."""
        known = self._counts.setdefault("adapter_requests", {})
        return name if (name,) in known or len(known) < MOST_ADAPTER_LABELS else "other"

    def _field_label(self, name: str) -> str:
        """The name itself, while there are few: clients must not be able to add any number of label values."""
        known = self._counts.setdefault("request_fields_ignored", {})
        return name if (name,) in known or len(known) < MOST_FIELD_LABELS else "other"

    def on_tool_parse(self, is_streamed: bool, has_calls: bool, path: str) -> None:
        """An answer has been parsed for tool calls."""
        mode = "streaming" if is_streamed else "non_streaming"
        outcome = "tool_call" if has_calls else "no_tool_call"
        self._count("tool_call_parser_invocations", 1, mode, outcome, REQUEST_TYPES.get(path, "other"))

    def _observe_whole(self, record: GenerationRecord) -> None:
        """Metrics of a whole request that finished by stop or length."""
        metrics = record.metrics
        assert metrics is not None
        tokens, decode = metrics.num_generation_tokens, metrics.last_token_ts - metrics.first_token_ts
        self._observe("e2e_request_latency_seconds", record.ended - record.arrived)
        self._observe("request_prompt_tokens", record.prompt_tokens)
        self._observe("request_prefill_kv_computed_tokens", record.prompt_tokens - record.cached_tokens)
        if metrics.scheduled_ts:
            self._observe("request_queue_time_seconds", max(0.0, metrics.queue_time))
        if isinstance(record.params, PoolingParams):
            return  # the rest is about generated tokens
        if metrics.scheduled_ts and metrics.first_token_ts:
            self._observe("request_inference_time_seconds", metrics.last_token_ts - metrics.scheduled_ts)
            self._observe("request_prefill_time_seconds", metrics.first_token_ts - metrics.scheduled_ts)
            self._observe("request_decode_time_seconds", decode)
        longest = metrics.max_num_generation_tokens
        if longest > 1:
            self._observe("request_time_per_output_token_seconds", decode / (longest - 1))
        self._observe("request_generation_tokens", tokens)
        self._observe("request_max_num_generation_tokens", longest)
        self._observe("request_num_preemptions", metrics.preemptions)
        self._observe("request_params_n", record.params.n)
        if record.params.max_tokens is not None:
            self._observe("request_params_max_tokens", record.params.max_tokens)

    def _count(self, name: str, value: float, *labels: str) -> None:
        counts = self._counts.setdefault(name, {})
        counts[labels] = counts.get(labels, 0.0) + value

    def _observe(self, name: str, value: float, *labels: str) -> None:
        histograms = self._histograms[name]
        histogram = histograms.get(labels)
        if histogram is None:
            histogram = histograms[labels] = Histogram(self._bounds[name])
        histogram.add(value)

    # The page

    async def page(self) -> bytes:
        """All metrics in Prometheus' text format. An engine that does not answer delays this by at most a second."""
        gather = self.gather_fronts
        fronts = [] if gather is None else [asyncio.ensure_future(gather())]
        await asyncio.gather(*(engine.refresh() for engine in self._engines), *fronts)
        self._fronts = fronts[0].result() if fronts else self._fronts
        return generate_latest(self.registry)

    def snapshot(self) -> MetricsSnapshot:
        """What this front has counted, but not what the engines and the limits have."""
        counts: dict[str, dict[Labels, float]] = {**self._counts}
        counts["generation_tokens"] = {(): float(self._llm.token_times.tokens)}
        if self._media is not None:
            counts |= {name: dict(self._media.measure(name)) for name in MEDIA_METRICS}
        histograms: dict[str, dict[Labels, Histogram]] = {**self._histograms, GAPS: self._gaps}
        return MetricsSnapshot(
            {name: list(values.items()) for name, values in counts.items()},
            {
                name: [(labels, HistogramCounts(list(one.counts), one.total)) for labels, one in series.items()]
                for name, series in histograms.items()
                if name not in ENGINE_HISTOGRAMS
            },
        )

    def families(self) -> Iterator[Family]:
        """Every metric that can be shown now."""
        for spec in ALL_METRICS:
            if spec in ROUTER_METRICS and len(self._engines) == 1:
                continue  # there is no router
            if spec.is_bare:
                yield _family(spec.name, spec, [((), self._values(spec))])
                continue
            values = self._values_by_engine(spec)
            if spec in OPTIONAL_METRICS and not any(of_engine for _, (_, of_engine) in values):
                continue  # there are no drafts, or no meter
            for prefix in self._prefixes:
                if prefix == OURS or not spec.is_ours:
                    yield _family(prefix + spec.name, spec, values)

    def _values_by_engine(self, spec: MetricSpec) -> list[tuple[Labels, Values]]:
        """A metric's values, by model and engine."""
        if spec in ENGINE_METRICS or spec in OPTIONAL_METRICS or spec.name in PER_ENGINE:
            return [((self._model_name, str(i)), engine.values(spec)) for i, engine in enumerate(self._engines)]
        engine = "0" if len(self._engines) == 1 else ALL_ENGINES
        return [((self._model_name, engine), self._values(spec))]

    def _values(self, spec: MetricSpec) -> Values:
        """A metric's own labels, and its values by label values."""
        if spec.kind == "histogram":
            series = self._gaps if spec.name == GAPS else self._histograms[spec.name]
            if (others := self._fronts.histograms.get(spec.name)) is not None:
                series = with_histograms(series, others, self._bounds[spec.name])
            return spec.labels, series
        values = self._plain_values(spec.name)
        if (more := self._fronts.counts.get(spec.name)) is not None:
            values = with_counts(values, more)
        return spec.labels, values

    @property
    def _gaps(self) -> dict[Labels, Histogram]:
        return {(): self._llm.token_times.gaps}

    def _plain_values(self, name: str) -> dict[Labels, float]:
        match name:
            case "generation_tokens":
                return {(): self._llm.token_times.tokens}
            case "requests_resumed":
                return {(): self._llm.num_resumed}
            case "requests_rejected":
                return {} if self._admission is None else {(key,): n for key, n in self._admission.rejected.items()}
        if name in STORE_METRICS:
            return {} if self._stored is None else dict(self._stored.measure(name))
        if name in MEDIA_METRICS:
            return {} if self._media is None else dict(self._media.measure(name))
        return self._counts.get(name, {})


class _Families(Collector):
    """A server's metrics, as a Prometheus collector."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        return self._metrics.families()

    def describe(self) -> list[Family]:
        """Empty, so that the registry does not collect at registration, before there is anything to show."""
        return []


def _family(name: str, spec: MetricSpec, sources: Sequence[tuple[Labels, Values]]) -> Family:
    """A metric family for Prometheus. All sources have the same labels; a source without values adds nothing."""
    labels = next((labels for _, (labels, values) in sources if values), spec.labels)
    names = [*(("model_name", "engine") if sources[0][0] else ()), *labels]
    if spec.kind == "histogram":
        family = HistogramMetricFamily(name, spec.help, labels=names)
        for owner, (_, values) in sources:
            for given, histogram in values.items():
                bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
                family.add_metric([*owner, *given], buckets, histogram.total)
        return family
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    plain = kind(name, spec.help, labels=names)
    for owner, (_, values) in sources:
        for given, value in values.items():
            plain.add_metric([*owner, *given], value)
    return plain
