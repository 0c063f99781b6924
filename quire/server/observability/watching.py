"""Each HTTP request from its beginning to its end, told to metrics, log and traces."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from quire.server.http import Exchange
from quire.server.observability.observer import HttpRecord, current_record

ROUTE = "quire.route"
"""Where a request's scope holds the path of its route, as the table has it."""
TRACE_HEADERS = ("traceparent", "tracestate")


class HttpWatch(Protocol):
    """Who wants to know of HTTP requests."""

    def on_http(self, record: HttpRecord) -> None:
        """One has been answered, or its client has gone."""


class WatchedRequest:
    """Makes a record of each request and hands it round when the request is over."""

    def __init__(self, watchers: Sequence[HttpWatch]) -> None:
        self._watchers = tuple(watchers)

    @contextmanager
    def request(self, exchange: Exchange) -> Iterator[HttpRecord]:
        """The block answers one request; everything it calls finds the record in `current_record`."""
        scope = exchange.scope
        record = HttpRecord(
            request_id=exchange.id,
            method=scope["method"],
            path=scope["path"],
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
            record.ended = time.monotonic()
            for watcher in self._watchers:
                watcher.on_http(record)
