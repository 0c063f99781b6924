"""OpenTelemetry spans, one for each request that generates. OpenTelemetry is imported only if traces are enabled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError
from quire.messages.pooling import PoolingParams
from quire.server.observability.observer import GenerationRecord, HttpRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Operation names of the gen_ai conventions, by route."""


class RequestTraces:
    """Makes a span for each HTTP request that reached the engine, in the caller's trace if it sent one."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("quire")
        self._model = model_name
        self._parent = TraceContextTextMapPropagator().extract
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    def on_http(self, record: HttpRecord) -> None:
        """A request has ended: make its span, with start and end times."""
        if not record.generations:
            return
        operation = OPERATIONS.get(record.handler, "generate_content")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._parent(dict(record.headers)),
            kind=self._kind,
            attributes=self._attributes(record, operation),
            start_time=record.arrived_wall_ns,
        )
        for generation in record.generations:
            if (seconds := generation.first_token_seconds) is not None:
                span.add_event("first token", timestamp=record.arrived_wall_ns + int(seconds * 1e9))
        if record.status >= 500 or any(generation.reason == "error" for generation in record.generations):
            span.set_status(self._failed)
        span.end(end_time=record.arrived_wall_ns + int(record.seconds * 1e9))

    def _attributes(self, record: HttpRecord, operation: str) -> dict[str, Any]:
        found = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": record.request_id,
            "gen_ai.response.finish_reasons": tuple(record.finish_reasons),
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.latency.time_in_queue": record.queue_seconds,
            "gen_ai.latency.time_to_first_token": record.first_token_seconds,
            "gen_ai.latency.e2e": record.seconds,
            "http.request.method": record.method,
            "http.response.status_code": record.status or None,
            "url.path": record.path,
            "quire.tenant": record.tenant or None,
            "quire.usage.draft_tokens": record.draft_tokens,
            "quire.usage.accepted_tokens": record.accepted_tokens,
            **_request_attributes(record.generations[0]),
        }
        return {name: value for name, value in found.items() if value is not None}

    def shutdown(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _request_attributes(record: GenerationRecord) -> dict[str, Any]:
    params = record.params
    if isinstance(params, PoolingParams):
        return {"gen_ai.embeddings.dimension.count": params.dimensions}
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
    }


def make_traces(endpoint: str, model_name: str) -> RequestTraces:
    """Sends spans to an OTLP/HTTP collector in the background; spans are dropped if it cannot be reached."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint must be a http(s) URL such as http://localhost:4318/v1/traces, got {endpoint!r}",
            "otlp_traces_endpoint",
            endpoint,
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry, and {error.name} is not installed: pip install 'quire[traces]'",
            "otlp_traces_endpoint",
            endpoint,
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "quire"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestTraces(provider, model_name)
