"""Everything that watches a server: metrics, log, traces."""

from __future__ import annotations

from quire.api.async_llm import AsyncLLM
from quire.server.config import ServerConfig
from quire.server.lifecycle.replicas import ReplicaSupervisor
from quire.server.lifecycle.supervisor import Supervisor
from quire.server.observability.logs import AccessLog, RequestLog
from quire.server.observability.metrics import Refusing, ServerMetrics
from quire.server.observability.observer import GenerationWatch, Observer
from quire.server.observability.tracing import RequestTraces, make_traces
from quire.server.observability.watching import HttpWatch, WatchedRequest


class Observability:
    """The watchers that a configuration asks for."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig,
        model_name: str,
        supervisor: Supervisor | ReplicaSupervisor,
        admission: Refusing,
    ) -> None:
        self.metrics = ServerMetrics(
            llm, model_name, config.vllm_metric_names, supervisor, admission,
            list(zip(llm.replicas, supervisor.each, strict=True)),
            tuple if llm.router is None else llm.router.stats,
        )  # fmt: skip
        self._traces: RequestTraces | None = None
        of_requests: list[HttpWatch] = [self.metrics, AccessLog()]
        of_generations: list[GenerationWatch] = [self.metrics]
        if config.otlp_traces_endpoint is not None:
            self._traces = make_traces(config.otlp_traces_endpoint, model_name)
            of_requests.append(self._traces)
        if config.enable_log_requests:
            of_generations.append(RequestLog())
        self.watching = WatchedRequest(of_requests)
        """Sees HTTP requests."""
        self.observer = Observer(*of_generations)
        """Sees requests to the engine."""

    def close(self) -> None:
        """Send what is not sent yet. May take a few seconds where a collector of traces does not answer."""
        if self._traces is not None:
            self._traces.shutdown()
