"""One span for each request that generates, inside the caller's trace; none unless enabled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire import SamplingParams
from quire.errors import ConfigError
from quire.server.observability.observer import HttpRecord, Observer, current_record
from quire.server.observability.tracing import RequestTraces, make_traces
from tests.server.conftest import Live

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> Iterator[RequestTraces]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made = RequestTraces(provider, "tiny")
    yield made
    made.shutdown()


def test_a_live_request_is_a_span_of_the_callers_trace(
    exporter: InMemorySpanExporter, traces: RequestTraces, serving: Callable[..., Live]
) -> None:
    live = serving()
    live.server.observer.http_listeners = [traces]
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    assert live.post("/v1/completions", body, headers=headers).status_code == 200
    assert live.post("/v1/completions", {**body, "stream": True}).status_code == 200
    live.client.get("/v1/models")
    live.post("/v1/completions", {"prompt": []})
    live.assert_idle()
    first, second = exporter.get_finished_spans()  # a request that generated nothing has no span
    assert first.name == "text_completion tiny"
    assert first.kind is SpanKind.SERVER
    assert f"{first.context.trace_id:032x}" == TRACE
    assert first.parent is not None and f"{first.parent.span_id:016x}" == PARENT
    assert second.parent is None
    found = dict(first.attributes or {})
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.request.max_tokens"] == 4
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (3, 4)
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["http.response.status_code"] == 200
    queue, token, whole = (found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e"))
    assert 0 <= queue <= token <= whole  # type: ignore[operator]
    assert first.end_time is not None and first.start_time is not None
    assert (first.end_time - first.start_time) / 1e9 == pytest.approx(whole, abs=1e-6)
    (event,) = first.events
    assert first.start_time < event.timestamp <= first.end_time


@pytest.mark.parametrize(("status", "reason"), [(500, None), (200, "error")])
def test_failed_requests_are_marked(
    exporter: InMemorySpanExporter, traces: RequestTraces, status: int, reason: str | None
) -> None:
    record = HttpRecord("id", "POST", "/v1/chat/completions", "/v1/chat/completions", arrived=1.0, ended=2.0)
    token = current_record.set(record)
    Observer().on_submit("r", SamplingParams()).on_finish(reason)
    current_record.reset(token)
    record.status = status
    traces.on_http(record)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.name == "chat tiny"


def test_an_invalid_endpoint_and_a_missing_package_are_errors_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="http://localhost:4318/v1/traces"):
        make_traces("localhost:4317", "tiny")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[traces\]'"):
        make_traces("http://localhost:4318/v1/traces", "tiny")


def test_opentelemetry_is_not_imported_unless_enabled() -> None:
    listing = "[name for name in sys.modules if name.startswith('opentelemetry')]"
    code = f"import quire.server.context, sys; print({listing})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
