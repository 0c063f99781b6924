"""Responses to invalid requests."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.conftest import MODEL, Live

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "abc"}]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which must have all its fields."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status and error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"temperature": 101}, "temperature", "[0, 100]"),
        (CHAT, {"temperature": -0.1}, "temperature", "[0, 100]"),
        (CHAT, {"top_p": 0}, "top_p", "(0, 1]"),
        (CHAT, {"n": 0}, "n", "from 1"),
        (CHAT, {"n": 129}, "n", "at most 128"),
        (CHAT, {"n": 10**30}, "n", ""),
        (CHAT, {"seed": 2**70}, "seed", ""),
        (CHAT, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        (CHAT, {"max_completion_tokens": 999}, "max_completion_tokens", "maximum context length"),
        (CHAT, {"max_tokens": 254}, "input_tokens", "maximum context length"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "to 20"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "from 0"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias", ""),
        (CHAT, {"logit_bias": {"100000": 1}}, "logit_bias", "vocabulary"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", ""),
        (CHAT, {"stop": [""]}, "stop", "non-empty"),
        (CHAT, {"stop": ["x"] * 65}, "stop", "at most 64"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        (CHAT, {"stream_options": {"include_usage": None}}, "stream_options", "stream=true"),
        (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "not streamed"),
        (CHAT, {"stream": "maybe"}, "stream", "bool"),
        (CHAT, {"messages": []}, "messages", "empty"),
        (CHAT, {"messages": "hello"}, "messages", "array"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages", "unknown role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "text parts only"),
        (CHAT, {"tools": [{"function": {"name": "f"}}] * 257}, "tools", "1 to"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not set"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, None, "cannot be combined"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", ""),
        (CHAT, {"structured_outputs": {}}, "structured_outputs", "structured_outputs is empty: give one of"),
        (CHAT, {"structured_outputs": {"structural_tag": {"structures": [{}], "triggers": ["a"]}}}, None, "is missing"),
        (CHAT, {"top_k": 2**64}, "top_k", "64 bits"),
        (CHAT, {"vllm_xargs": {"a": [2**64]}}, "vllm_xargs", "64 bits"),
        (CHAT, {"truncate_prompt_tokens": 2**64}, "truncate_prompt_tokens", "64 bits"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 2**64}, "truncate_prompt_tokens", "64 bits"),
        ("/v1/sessions/nobody/fork", {"id": "a", "at": 2**64}, "at", "64 bits"),
        (CHAT, {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        (CHAT, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "disable_any_whitespace"),
        (CHAT, {"functions": [{}]}, "functions[0].name", "missing"),
        (CHAT, {"audio": {"voice": "low"}}, "audio", "text"),
        (CHAT, {"modalities": ["audio"]}, "modalities", "text"),
        (CHAT, {"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "not supported: KV transfer"),
        (CHAT, {"messages": [{"role": "user", "audio": {"id": "x"}}]}, "messages[0].audio", "not supported"),
        (CHAT, {"request_id": "two words"}, "request_id", "printable"),
        (CHAT, {"timeout": 0}, "timeout", "above 0"),
        (CHAT, {"priority": 2**40}, "priority", "32 bits"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": []}, "prompt", "empty"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "one of the two"),
        (TEXT, {"prompt": [[1], []]}, "prompt", "empty"),
        (TEXT, {"prompt": [-1]}, "prompt", "vocabulary"),
        (TEXT, {"prompt": [128]}, "prompt", "vocabulary"),
        (TEXT, {"prompt": [10**30]}, "prompt", "vocabulary"),
        (TEXT, {"prompt": [[5], [128]]}, "prompt", "prompt: token id 128"),
        (TEXT, {"prompt": [5] * 256}, "input_tokens", "maximum context length is 256"),
        (TEXT, {"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
        (TEXT, {"max_tokens": 0}, "max_tokens", "needs echo"),
        (TEXT, {"max_tokens": -1}, "max_tokens", "at least 0"),
        (TEXT, {"suffix": "x"}, "suffix", "only at the end"),
        (TEXT, {"best_of": 3}, "best_of", "n sequences"),
        (TEXT, {"logprobs": 30}, "logprobs", "at most 20"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt", "either"),
        ("/detokenize", {"tokens": [5, 128]}, "tokens", "vocabulary"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "int"),
    ],
)
def test_a_wrong_value_is_named(live: Live, path: str, fields: dict[str, Any], param: str | None, words: str) -> None:
    base = {CHAT: {"messages": USER}, TEXT: {"prompt": "abc"}}.get(path, {})
    error = error_of(live.post(path, {**base, **fields}), 400)
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("path, base", [(CHAT, {"messages": USER}), (TEXT, {"prompt": "abc"})])
def test_null_and_empty_are_accepted_for_refused_fields(live: Live, path: str, base: dict[str, Any]) -> None:
    refused = ["guided_whitespace_pattern", "mm_processor_kwargs", "kv_transfer_params", "thinking_token_budget"]
    for nothing in (None, {}, [], ""):
        answer = live.post(path, {**base, "max_tokens": 1, **dict.fromkeys(refused, nothing)})
        assert answer.status_code == 200 and "x-quire-ignored" not in answer.headers
    for name in refused:
        assert error_of(live.post(path, {**base, name: 1}), 400)["param"] == name


MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
SESSIONS = "/v1/sessions"
EMPTY: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}
NEGATED: dict[str, Any] = {"type": "object", "not": {}}
SCHEMA = {"type": "json_schema", "name": "x"}


def form_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def function_of(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"function": {"name": "f", "parameters": parameters}}


BASES = {
    CHAT: {"messages": USER},
    TEXT: {"prompt": "abc"},
    MESSAGES: {"messages": USER, "max_tokens": 4},
    RESPONSES: {"input": "abc"},
}


@pytest.mark.parametrize(
    ("path", "fields", "param", "inner"),
    [
        (CHAT, {"session_id": "two words"}, "session_id", "name:"),
        (TEXT, {"session_id": "x" * 129}, "session_id", "name:"),
        (CHAT, {"response_format": form_of(NEGATED)}, "response_format.json_schema.schema", "structured_outputs"),
        (CHAT, {"response_format": form_of(EMPTY)}, "response_format", "structured_outputs"),
        (TEXT, {"response_format": form_of(EMPTY)}, "response_format", "structured_outputs"),
        (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format", "structured_outputs"),
        (CHAT, {"structured_outputs": {"json": EMPTY}}, "structured_outputs", "response_format"),
        (CHAT, {"tools": [function_of(EMPTY)], "tool_choice": "required"}, "tools", "structured_outputs"),
        (CHAT, {"tools": [function_of(NEGATED)], "tool_choice": "required"}, "tools", "structured_outputs"),
        (CHAT, {"tools": [function_of({"$defs": 5})], "tool_choice": "required"}, "tools", "structured_outputs"),
        (CHAT, {"tools": [function_of({"required": [[]]})], "tool_choice": "required"}, "tools", "structured_outputs"),
        (CHAT, {"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens", "max_tokens"),
        (RESPONSES, {"max_output_tokens": 999}, "max_output_tokens", "max_completion_tokens"),
        (RESPONSES, {"max_output_tokens": 2, "min_tokens": 3}, "min_tokens", "max_tokens"),
        (RESPONSES, {"max_output_tokens": 254}, "input_tokens", "max_completion_tokens"),
        (RESPONSES, {"text": {"format": {**SCHEMA, "schema": NEGATED}}}, "text.format.schema", "structured_outputs"),
        (RESPONSES, {"text": {"format": {**SCHEMA, "schema": EMPTY}}}, "text.format", "structured_outputs"),
        (RESPONSES, {"input": [{"role": "king", "content": "x"}]}, "input[0].role", "messages"),
        (MESSAGES, {"stop_sequences": [""]}, None, "stop must"),
        (MESSAGES, {"stop_sequences": ["x"] * 65}, None, "stop must"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": EMPTY}}}, None, "structured_outputs"),
        (SESSIONS, {"id": "two words"}, "id", "name:"),
        (SESSIONS, {"name": "two words"}, "name", "id:"),
        (SESSIONS, {"input": [128]}, "input", "prompt_token_ids"),
        (SESSIONS, {"metadata": {"a": "x" * 100_000}}, "metadata", "meta "),
    ],
)  # fmt: skip
def test_an_error_names_the_field_as_it_was_sent(
    live: Live, path: str, fields: dict[str, Any], param: str | None, inner: str
) -> None:
    answer = live.post(path, {**BASES.get(path, {}), **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.get("param") == param and inner not in error["message"], error
    sent = next(iter(fields))
    assert any(word in error["message"] for word in (sent, param or sent)), error


def test_an_error_names_the_session_header_too(live: Live) -> None:
    error = error_of(live.post(CHAT, {"messages": USER}, headers={"X-Session-Id": "two words"}), 400)
    assert error["param"] == "X-Session-Id" and error["message"].startswith("X-Session-Id: 'two words'")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b'{"messages": [{"role": "user", "content": "a"}]} more', b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "a"}], "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "metadata": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
        b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": '
        b'{"schema": ' + b'{"not":' * 900 + b"{}" + b"}" * 900 + b"}}}",
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_invalid_bodies_are_refused(live: Live, body: bytes) -> None:
    answer = live.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    error_of(answer, 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_of_another_content_type_is_refused(live: Live, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    error = error_of(live.client.post(CHAT, content=b'{"messages": []}', headers=headers), 415)
    assert "application/json" in error["message"]


def test_a_compressed_body_is_refused(live: Live) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error_of(live.client.post(CHAT, content=b"\x1f\x8b", headers=headers), 415)


def test_unknown_model_path_or_method(live: Live) -> None:
    error = error_of(live.post(CHAT, {"model": "gpt-4", "messages": USER}), 404)
    assert error["type"] == "NotFoundError" and error["param"] == "model" and MODEL in error["message"]
    error_of(live.client.get("/v1/models/gpt-4"), 404)
    error_of(live.client.get("/nothing/here"), 404)
    error_of(live.client.get("/admin/stats"), 404)
    answer = live.client.get(CHAT)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    error_of(live.client.post("/v1/models", json={}), 405)


def test_null_is_the_default_of_every_field(live: Live) -> None:
    from quire.server.protocol.chat import ChatRequest
    from quire.server.protocol.completions import CompletionRequest

    for kind, path, base in (
        (ChatRequest, CHAT, {"messages": USER, "max_tokens": 2}),
        (CompletionRequest, TEXT, {"prompt": "abc", "max_tokens": 2}),
    ):
        nulls = dict.fromkeys(kind.__struct_fields__)
        assert live.post(path, {**nulls, **base}).status_code == 200


def test_parameters_with_their_default_value_are_accepted(live: Live) -> None:
    fields = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"],
        "best_of": 1, "parallel_tool_calls": True, "logit_bias": {}, "tool_choice": "none", "use_beam_search": False,
    }  # fmt: skip
    assert live.post(CHAT, {"messages": USER, "max_tokens": 2, **fields}).status_code == 200


def test_a_body_that_is_too_large(serving: Callable[..., Live]) -> None:
    live = serving(max_body_bytes=1000)
    long = {"messages": [{"role": "user", "content": "x" * 1000}]}
    error = error_of(live.post(CHAT, long), 413)
    assert "1000" in error["message"]

    def pieces() -> Any:
        for _ in range(100):
            yield b" " * 100

    answer = live.client.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
    error_of(answer, 413)


def connect(live: Live) -> socket.socket:
    address = httpx.URL(live.url)
    return socket.create_connection((address.host, address.port or 80), timeout=20)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


class TestHeaders:
    def test_a_header_that_is_too_long(self, live: Live) -> None:
        answer = live.client.get("/version", headers={"x-long": "x" * 70_000})
        error_of(answer, 431)

    def test_a_header_that_never_ends(self, live: Live) -> None:
        with connect(live) as sock:
            sock.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nx-long: ")
            try:
                for _ in range(1000):
                    sock.sendall(b"x" * 65536)
            except OSError:
                return
            assert b" 431 " in read_all(sock)

    def test_many_small_headers_and_a_long_path(self, live: Live) -> None:
        with connect(live) as sock:
            sock.sendall(b"GET /version HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(10_000)) + b"\r\n")
            assert b" 431 " in read_all(sock)
        with connect(live) as sock:
            sock.sendall(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 431 " in read_all(sock)

    def test_a_long_body_is_not_limited_as_a_header(self, live: Live) -> None:
        body = b'{"prompt": "x"' + b" " * 100_000 + b"}"
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        with connect(live) as sock:
            sock.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert b" 200 " in read_all(sock)[:20]

    def test_requests_that_are_not_http(self, live: Live) -> None:
        with connect(live) as sock:
            sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
            assert b" 400 " in read_all(sock)


def test_a_truncated_body(live: Live, serving: Callable[..., Live]) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n"
    with connect(live) as sock:
        sock.sendall(head + b'{"messages')
    live.assert_idle()
    patient = serving(stall_timeout=0.3)
    with connect(patient) as sock:
        begin = time.monotonic()
        sock.sendall(head + b'{"messages')
        assert b" 408 " in read_all(sock)
        assert time.monotonic() - begin < 5
