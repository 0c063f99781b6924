"""Log lines: each has its request, none has a prompt, and no client can forge one."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from quire.server.observability.logs import AccessLog, RequestLog, set_up
from quire.server.observability.observer import HttpRecord, current_record
from tests.server.conftest import Live

SECRET = "xx the secret words xx"


@pytest.fixture
def log() -> Callable[[str], io.StringIO]:
    """Sets up logging with a test's settings."""

    def start(format: str, level: str = "info") -> io.StringIO:
        stream = io.StringIO()
        set_up(format, level, stream)
        return stream

    return start


def lines(stream: io.StringIO, logger: str = "") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in found if line["logger"].startswith(logger)]


def test_a_request_logs_one_line_with_everything_but_its_text(
    log: Callable[[str], io.StringIO], serving: Callable[..., Live]
) -> None:
    stream = log("json")
    live = serving()
    body = {"prompt": SECRET, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    response = live.post("/v1/completions", body, headers={"x-request-id": "mine-1", "x-tenant": "acme"})
    live.client.get("/health")
    live.assert_idle()
    (line,) = lines(stream, "quire.access")
    usage = response.json()["usage"]
    assert line["request_id"] == "mine-1"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["tenant"] == "acme"
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], 4)
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert line["finish_reason"] == "length"
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["duration_ms"]
    assert SECRET not in stream.getvalue()


def test_prompts_are_logged_only_when_enabled(log: Callable[[str], io.StringIO], serving: Callable[..., Live]) -> None:
    stream = log("json")
    live = serving(enable_log_requests=True)
    live.post("/v1/completions", {"prompt": SECRET, "max_tokens": 2}, headers={"x-request-id": "mine-2"})
    (line,) = lines(stream, "quire.requests")
    assert line["prompt"] == SECRET
    assert line["request_id"] == "mine-2"
    assert "max_tokens=2" in line["params"]


def test_how_much_of_a_prompt_is_logged_and_whether_requests_are(
    log: Callable[[str], io.StringIO], serving: Callable[..., Live]
) -> None:
    stream = log("json")
    live = serving(enable_log_requests=True, max_log_len=3, access_log=False)
    live.post("/v1/completions", {"prompt": SECRET, "max_tokens": 2})
    (line,) = lines(stream, "quire.requests")
    assert line["prompt"] == SECRET[:3]
    assert lines(stream, "quire.access") == []


def test_a_line_logged_while_a_request_is_handled_has_its_id(log: Callable[[str], io.StringIO]) -> None:
    for format in ("json", "text"):
        stream = log(format)
        token = current_record.set(HttpRecord("abc", "GET", "/", "/"))
        logging.getLogger("quire.somewhere").info("this happened")
        current_record.reset(token)
        logging.getLogger("quire.somewhere").info("and this")
        first, second = stream.getvalue().splitlines()
        assert "abc" in first and "abc" not in second


def test_client_input_stays_on_its_line(log: Callable[[str], io.StringIO]) -> None:
    nasty = "/x\n12:00:00 info    POST /admin 200\x1b[31m"
    for format in ("text", "json"):
        stream = log(format)
        AccessLog().on_http(HttpRecord("id", "GET", nasty, "none", status=404))
        written = stream.getvalue()
        assert written.count("\n") == 1
        assert "\x1b" not in written


def test_an_exception_is_one_json_object(log: Callable[[str], io.StringIO]) -> None:
    stream = log("json")
    try:
        raise ValueError("so\nit is")
    except ValueError:
        logging.getLogger("quire.somewhere").exception("it failed")
    (line,) = lines(stream)
    assert line["level"] == "error"
    assert "ValueError" in line["exception"]
    assert line["time"].endswith("Z")


def test_uvicorns_lines_have_the_same_format(log: Callable[[str], io.StringIO]) -> None:
    stream = log("json")
    logging.getLogger("uvicorn.error").warning("hello")
    logging.getLogger("uvicorn.access").info("GET / 200")
    assert [line["message"] for line in lines(stream)] == ["hello"]


def test_health_checks_and_scrapes_are_logged_at_debug_level_only(log: Callable[..., io.StringIO]) -> None:
    for level, count in (("info", 0), ("debug", 1)):
        stream = log("json", level)
        AccessLog().on_http(HttpRecord("id", "GET", "/health", "/health", status=200))
        assert len(lines(stream)) == count


def test_a_prompt_of_token_ids_is_logged_in_part(log: Callable[[str], io.StringIO]) -> None:
    from quire import SamplingParams
    from quire.server.observability.observer import Observer

    stream = log("json")
    Observer(RequestLog(2048)).on_submit("r", SamplingParams(), list(range(100_000)))
    (line,) = lines(stream)
    assert len(line["prompt"]) == 2048
