"""Log lines of the server, as text or JSON, with the id of their request. Prompts are not logged by default."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from typing import Any, TextIO

from quire.server.observability.observer import ROUTINE_PATHS, GenerationRecord, HttpRecord, current_record

access = logging.getLogger("quire.access")
requests = logging.getLogger("quire.requests")


def _request_id() -> str | None:
    record = current_record.get()
    return None if record is None else record.request_id


class TextFormatter(logging.Formatter):
    """`12:01:03 info    a message [request id]`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():<7} {record.getMessage()}"
        if (request_id := _request_id()) is not None and request_id not in line:
            line += f" [{request_id}]"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the record's `fields` besides the message."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := _request_id()) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(format: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send quire's and uvicorn's logs, in one format, to one stream (stderr). Replaces their handlers."""
    # transformers has its own handler, and logs advice for direct callers.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    for name in ("quire", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = name == "quire"  # uvicorn's lines would appear twice if the root logger has a handler
    for name in ("uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        child = logging.getLogger(name)
        child.handlers, child.propagate = [], True
    # AccessLog writes a line for each request.
    logging.getLogger("uvicorn.access").setLevel("WARNING")


class AccessLog:
    """A line for each HTTP request: route, status, duration, token counts; never its content."""

    def on_http(self, record: HttpRecord) -> None:
        """A request has ended."""
        level = logging.DEBUG if record.handler in ROUTINE_PATHS else logging.INFO
        if access.isEnabledFor(level):
            fields = access_fields(record)
            access.log(level, "%s", _sentence(fields), extra={"fields": fields})


def access_fields(record: HttpRecord) -> dict[str, Any]:
    """The fields of a request's line; unknown ones are left out."""
    fields: dict[str, Any] = {
        "method": record.method,
        "path": record.path,
        "status": record.status or None,
        "duration_ms": _milliseconds(record.seconds),
        "request_id": record.request_id,
        "tenant": record.tenant or None,
        "ignored": ",".join(record.ignored) or None,
    }
    if record.generations:
        fields |= {
            "adapter": record.generations[0].adapter or None,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "cached_tokens": record.cached_tokens,
            "images": record.images,
            "draft_tokens": record.draft_tokens,
            "accepted_tokens": record.accepted_tokens,
            "queue_ms": _milliseconds(record.queue_seconds),
            "ttft_ms": _milliseconds(record.first_token_seconds),
            "joules": None if record.joules is None else round(record.joules, 3),
            "finish_reason": ",".join(dict.fromkeys(record.finish_reasons)),
        }
    return {name: value for name, value in fields.items() if value is not None}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def _sentence(fields: dict[str, Any]) -> str:
    """The fields as one line of printable characters, whatever the client sent."""
    rest = {name: value for name, value in fields.items() if name not in ("method", "path", "status", "duration_ms")}
    head = f"{fields['method']} {fields['path']} {fields.get('status', 'disconnected')} {fields['duration_ms']:.1f} ms"
    line = " ".join([head, *(f"{name}={value}" for name, value in rest.items())])
    return "".join(letter if letter.isprintable() else "?" for letter in line)


class RequestLog:
    """A line for each request to the engine, with its prompt; used only with --enable-log-requests."""

    def __init__(self, longest: int) -> None:
        """`longest`: characters or tokens of a prompt that are logged."""
        self._longest = longest

    def on_submit(self, record: GenerationRecord) -> None:
        """A request is being sent to the engine."""
        prompt = record.prompt[: self._longest] if record.prompt is not None else None
        fields = {"request_id": record.request_id, "prompt": prompt, "params": repr(record.params)}
        if record.adapter:
            fields["adapter"] = record.adapter
        requests.info("request %s: %r, %s", record.request_id, prompt, record.params, extra={"fields": fields})

    def on_first_output(self, record: GenerationRecord) -> None:
        pass

    def on_finish(self, record: GenerationRecord) -> None:
        pass
