"""Metrics of each engine: those it reports, queried with a timeout, and those of the front process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from quire.api.router_feed import RouterFeed
from quire.config import EngineConfig
from quire.engine.engine_info import EngineInfo
from quire.engine.stats import Metric
from quire.errors import QuireError
from quire.messages.histogram import Histogram
from quire.messages.metric_table import OPTIONAL_METRICS, ROUTER_METRICS, MetricSpec
from quire.router.router import ReplicaLoadStats

REPORT_TIMEOUT_SECONDS = 1.0
GONE_WITH_ENGINE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_blocks_used")
"""Gauges shown as zero while the engine is down."""
PER_ENGINE = frozenset(("cache_config_info", "engine_up", "engine_restarts", *(spec.name for spec in ROUTER_METRICS)))
"""Metrics of each engine that it does not report itself."""

Labels = tuple[str, ...]
Values = tuple[Sequence[str], dict[Labels, Any]]
"""A metric's own labels, and its values by label values."""


class MetricsSource(Protocol):
    """An engine that reports metrics."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def errored(self) -> bool: ...

    async def get_metrics(self) -> list[Metric]: ...


class MeasuredReplica(MetricsSource, Protocol):
    """One of several engines, with the router's view of it."""

    number: int
    router_feed: RouterFeed | None


class RestartCounter(Protocol):
    """Counts restarts; `Supervisor` does."""

    @property
    def restarts(self) -> int: ...


class LatestMetrics:
    """The last metrics the engine reported. Concurrent readers share one query."""

    def __init__(self, query: Callable[[], Awaitable[list[Metric]]]) -> None:
        self._query = query
        self._querying: asyncio.Task[None] | None = None
        self.by_name: dict[str, Metric] = {}
        """By name, without a prefix."""

    async def refresh(self, seconds: float = REPORT_TIMEOUT_SECONDS) -> None:
        """Query the engine. If it is dead or does not answer in time, the last metrics stay."""
        if self._querying is None or self._querying.done():
            self._querying = asyncio.ensure_future(self._read())
        await asyncio.wait([self._querying], timeout=seconds)

    async def _read(self) -> None:
        try:
            metrics = await self._query()
        except QuireError:  # dead; the last metrics stay
            return
        self.by_name = {metric.name.partition(":")[2]: metric for metric in metrics}


class EngineMetrics:
    """One engine's part of the /metrics page."""

    def __init__(self, engine: MetricsSource, config: EngineConfig, supervisor: RestartCounter | None = None) -> None:
        self._engine = engine
        self._config = config
        self._supervisor = supervisor
        self._latest = LatestMetrics(engine.get_metrics)

    async def refresh(self) -> None:
        """Query the engine, with a timeout."""
        await self._latest.refresh()

    def values(self, spec: MetricSpec) -> Values:
        """A metric's values."""
        match spec.name:
            case "cache_config_info":
                labels = self._cache_info()
                return tuple(labels), {tuple(labels.values()): 1.0}
            case "engine_up":
                return (), {(): 0.0 if self._engine.errored else 1.0}
            case "engine_restarts":
                return (), {(): 0 if self._supervisor is None else self._supervisor.restarts}
            case "num_requests_waiting_by_reason":
                waiting, deferred = self._value("num_requests_waiting"), self._value("num_requests_deferred")
                return spec.labels, {("capacity",): max(0.0, waiting - deferred), ("deferred",): deferred}
        return spec.labels, self._reported(spec)

    def _reported(self, spec: MetricSpec) -> dict[Labels, Any]:
        metric = self._latest.by_name.get(spec.name)
        if metric is None and spec in OPTIONAL_METRICS:
            return {}
        if spec.labels:
            return {} if metric is None else dict(metric.series)
        if spec.kind != "histogram":
            return {(): self._value(spec.name)}
        if metric is None:
            return {(): Histogram(spec.bounds)}
        histogram = Histogram(metric.bounds)
        histogram.counts, histogram.total = list(metric.counts), metric.value
        return {(): histogram}

    def _value(self, name: str) -> float:
        metric = self._latest.by_name.get(name)
        return 0.0 if metric is None or (self._engine.errored and name in GONE_WITH_ENGINE) else metric.value

    def _cache_info(self) -> dict[str, str]:
        engine, config = self._engine.info, self._config
        info = {
            "block_size": engine.block_size,
            "num_gpu_blocks": engine.num_blocks,
            "kv_cache_size_tokens": engine.cache_tokens,
            "kv_cache_max_concurrency": round(engine.cache_tokens / engine.max_model_len, 2),
            "kv_cache_memory_bytes": engine.kv_bytes,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
        }
        return {name: str(value) for name, value in info.items()}


class ReplicaMetrics(EngineMetrics):
    """The part of one of several engines: adds the router's metrics."""

    def __init__(
        self,
        replica: MeasuredReplica,
        config: EngineConfig,
        supervisor: RestartCounter,
        routing: Callable[[], Sequence[ReplicaLoadStats]],
    ) -> None:
        super().__init__(replica, config, supervisor)
        self._replica = replica
        self._routing = routing

    def values(self, spec: MetricSpec) -> Values:
        """A metric's values, including the router's."""
        return ((), self._routed(spec.name)) if spec in ROUTER_METRICS else super().values(spec)

    def _routed(self, name: str) -> dict[Labels, float]:
        load = next((one for one in self._routing() if one.name == str(self._replica.number)), None)
        traffic = self._replica.router_feed
        if load is None or traffic is None:  # it is down
            return {(): 0.0}
        values: dict[str, float] = {
            "router_open_requests": load.open_requests,
            "router_queued_tokens": load.queued_tokens,
            "router_wait_seconds": load.wait_seconds,
            "router_known_blocks": load.known_blocks,
            "router_prompt_tokens": traffic.prompt_tokens,
            "router_expected_hits": traffic.expected_tokens,
        }
        return {(): values[name]}
