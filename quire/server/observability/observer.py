"""Records of HTTP requests and of requests to the engine, passed to metrics, logs and traces.

`Observer.http_request` makes an `HttpRecord` for each HTTP request and sets `current_record`. Code that sends a request
to the engine makes a `GenerationRecord`:

    record = context.observer.on_submit(request_id, params, prompt)
    try:
        async for output in outputs:
            record.on_output(output)
    except QuireError:
        record.on_finish("error")
        raise
    finally:
        record.on_finish()  # no effect if it has finished; a request left before its last output was aborted

A streamed token costs one assignment here: token times are taken where tokens arrive (`quire.output.processor`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from quire.messages.adapter_use import AdapterUse
from quire.messages.outputs import RequestMetrics, RequestOutput
from quire.messages.pooling import PoolingParams
from quire.messages.sampling import SamplingParams
from quire.server.http import Exchange

Params = SamplingParams | PoolingParams

ROUTINE_PATHS = frozenset(("/health", "/ready", "/metrics", "/load", "/ping", "/version"))
"""Routes polled every few seconds: logged at debug level and left out of HTTP latency metrics."""
ROUTE = "quire.route"
"""Key of the ASGI scope that holds the matched route's path, as the route table has it."""
LONGEST_PATH = 256
"""Characters of a path in logs and traces."""
TRACE_HEADERS = ("traceparent", "tracestate")


class GenerationRecord:
    """One request to the engine, from submission to end."""

    def __init__(
        self,
        request_id: str,
        params: Params,
        prompt: str | list[int] | None,
        arrived: float,
        listeners: Sequence[GenerationListener],
        adapters: Sequence[AdapterUse] = (),
        images: int = 0,
        image_tokens: int = 0,
    ) -> None:
        self.request_id = request_id
        """The HTTP request's id."""
        self.params = params
        self.prompt = prompt
        self.adapter = "+".join(use.name for use in adapters)
        """The names of its LoRA adapters; empty without."""
        self.arrived = arrived
        """When the server received it, in monotonic seconds: before templates and tokenizing."""
        self.ended = 0.0
        self.reason = ""
        """stop, length, abort or error, once it has ended."""
        self.output: RequestOutput | None = None
        """The last output that was read."""
        self.images = images
        """Images and videos of the prompt, and…"""
        self.image_tokens = image_tokens
        """…the tokens that stand for them."""
        self._listeners = listeners

    def on_output(self, output: RequestOutput) -> None:
        """An output was read."""
        is_first, self.output = self.output is None, output
        if is_first:
            for listener in self._listeners:
                listener.on_first_output(self)

    def on_finish(self, reason: str | None = None) -> None:
        """The request has ended. Without a reason, the last output's, else abort. Only the first call counts."""
        if not self.reason:
            self.ended = time.monotonic()
            self.reason = reason or self._output_reason()
            for listener in self._listeners:
                listener.on_finish(self)

    def _output_reason(self) -> str:
        reasons = self.finish_reasons
        if not reasons:
            return "abort"
        return next((bad for bad in ("error", "abort") if bad in reasons), reasons[0])

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each sequence, in index order; empty until all have finished."""
        if self.output is None or not self.output.finished:
            return []
        return [sequence.finish_reason or "abort" for sequence in self.output.outputs]

    @property
    def metrics(self) -> RequestMetrics | None:
        """Its times, once there is an output."""
        return None if self.output is None else self.output.metrics

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.output is None else len(self.output.prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        return 0 if self.output is None else self.output.num_cached_tokens or 0

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, over all sequences."""
        return 0 if self.metrics is None else self.metrics.num_generation_tokens

    @property
    def draft_tokens(self) -> int:
        """Drafts verified so far, over all sequences."""
        return 0 if self.metrics is None else self.metrics.num_draft_tokens

    @property
    def accepted_tokens(self) -> int:
        """Those of them that were accepted."""
        return 0 if self.metrics is None else self.metrics.num_accepted_tokens

    @property
    def joules(self) -> float | None:
        """Energy it took so far; None if it is not metered."""
        metrics = self.metrics
        return None if metrics is None or metrics.energy_source is None else metrics.joules

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from arrival to the first token; None without one."""
        metrics = self.metrics
        return None if metrics is None or not metrics.first_token_ts else metrics.first_token_ts - self.arrived

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from the engine's queue to the first step; None if it was never scheduled."""
        metrics = self.metrics
        return None if metrics is None or not metrics.scheduled_ts else max(0.0, metrics.queue_time)


@dataclass(slots=True)
class HttpRecord:
    """One HTTP request, as it is reported once it has been answered."""

    request_id: str
    method: str
    path: str
    handler: str
    """The route's path with its parameters as placeholders, or "none": clients must not be able to add label values."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those that carry a trace."""
    tenant: str = ""
    arrived: float = field(default_factory=time.monotonic)
    arrived_wall_ns: int = field(default_factory=time.time_ns)
    ended: float = 0.0
    status: int = 0
    """0: the client disconnected before there was one."""
    ignored: Sequence[str] = ()
    """Fields of the body that had no effect; names of printable ASCII characters."""
    generations: list[GenerationRecord] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.ended - self.arrived

    @property
    def prompt_tokens(self) -> int:
        return sum(record.prompt_tokens for record in self.generations)

    @property
    def cached_tokens(self) -> int:
        return sum(record.cached_tokens for record in self.generations)

    @property
    def output_tokens(self) -> int:
        return sum(record.output_tokens for record in self.generations)

    @property
    def images(self) -> int | None:
        """Images and videos of the prompts; None: none."""
        return sum(record.images for record in self.generations) or None

    @property
    def draft_tokens(self) -> int | None:
        """Drafts that were verified; None: none."""
        return sum(record.draft_tokens for record in self.generations) or None

    @property
    def accepted_tokens(self) -> int | None:
        """Those of them that were accepted; None: there were no drafts."""
        return self.draft_tokens and sum(record.accepted_tokens for record in self.generations)

    @property
    def joules(self) -> float | None:
        """Energy of all its generations; None if it is not metered."""
        known = [record.joules for record in self.generations if record.joules is not None]
        return sum(known) if known else None

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each sequence; one for all sequences of a request that was cut short."""
        return [
            reason for record in self.generations for reason in (record.finish_reasons or [record.reason or "abort"])
        ]

    @property
    def queue_seconds(self) -> float | None:
        """The longest queue time among its requests to the engine; None if none was scheduled."""
        return _longest(record.queue_seconds for record in self.generations)

    @property
    def first_token_seconds(self) -> float | None:
        """The longest time to first token among its requests to the engine; None without a token."""
        return _longest(record.first_token_seconds for record in self.generations)


def _longest(seconds: Iterable[float | None]) -> float | None:
    return max((value for value in seconds if value is not None), default=None)


current_record: ContextVar[HttpRecord | None] = ContextVar("quire_request", default=None)
"""The HTTP request that this task is answering."""


class GenerationListener(Protocol):
    """Is notified of requests to the engine."""

    def on_submit(self, record: GenerationRecord) -> None:
        """It is being sent to the engine."""

    def on_first_output(self, record: GenerationRecord) -> None:
        """The first output arrived: prompt, cached tokens and first token are known."""

    def on_finish(self, record: GenerationRecord) -> None:
        """It has ended."""


class HttpListener(Protocol):
    """Is notified of HTTP requests."""

    def on_http(self, record: HttpRecord) -> None:
        """One has been answered, or its client has disconnected."""


class Observer:
    """Makes the records of one server and passes them to the listeners."""

    def __init__(self, *listeners: GenerationListener, http: Sequence[HttpListener] = ()) -> None:
        self._listeners = listeners
        self.http_listeners = http

    @contextmanager
    def http_request(self, exchange: Exchange) -> Iterator[HttpRecord]:
        """Record one HTTP request; code called inside the block finds the record in `current_record`."""
        scope = exchange.scope
        record = HttpRecord(
            request_id=exchange.id,
            method=scope["method"],
            path=scope["path"][:LONGEST_PATH],
            handler="none",
            headers={name: exchange.headers[name] for name in TRACE_HEADERS if name in exchange.headers},
            arrived=exchange.arrived,
        )
        token = current_record.set(record)
        try:
            yield record
        finally:
            current_record.reset(token)
            record.handler = scope.get(ROUTE, "none")
            record.request_id, record.tenant, record.status = exchange.id, exchange.tenant, exchange.status
            record.ignored = exchange.fields.ignored
            record.ended = time.monotonic()
            for listener in self.http_listeners:
                listener.on_http(record)

    def on_submit(
        self,
        request_id: str,
        params: Params,
        prompt: str | list[int] | None = None,
        adapters: Sequence[AdapterUse] = (),
        images: int = 0,
        image_tokens: int = 0,
    ) -> GenerationRecord:
        """Record a request to the engine. Its arrival is that of the current HTTP request, if there is one. `images`:
        of its prompt, and their tokens."""
        http = current_record.get()
        arrived = time.monotonic() if http is None else http.arrived
        record = GenerationRecord(request_id, params, prompt, arrived, self._listeners, adapters, images, image_tokens)
        if http is not None:
            http.generations.append(record)
        for listener in self._listeners:
            listener.on_submit(record)
        return record
