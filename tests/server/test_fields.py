"""The rule for fields: unknown ones are accepted and named, hints have no effect, null and empty ask for nothing, and
numbers and booleans may be text."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from quire.server.errors import ApiError
from quire.server.observability.logs import set_up
from quire.server.observability.metrics import MOST_FIELD_LABELS
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.fields import LONGEST_NAME, MOST_NAMES, FieldReader
from tests.server.conftest import Live
from tests.server.scrape import Scrape

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "abc"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def read(body: dict[str, Any], kind: Any = ChatRequest, is_strict: bool = False) -> tuple[Any, list[str]]:
    """The struct, and the names of what was left out."""
    fields = FieldReader(is_strict)
    return fields.decode(json.dumps(body).encode(), kind), fields.ignored


UNKNOWN = [
    ({"colour": "red"}, "colour"),
    ({"temprature": 0.5}, "temprature"),
    ({"messages": [{**USER[0], "mood": {"a": [1]}}]}, "messages[].mood"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "colour": 1}]}]}, "messages[].tool_calls[].colour"),
    ({"tools": [{**TOOL, "colour": 1}]}, "tools[].colour"),
    ({"tools": [{"type": "function", "function": {"name": "f", "colour": 1}}]}, "tools[].function.colour"),
    ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
    ({"response_format": {"type": "text", "colour": 1}}, "response_format.colour"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "f", "colour": 1}}}, "tool_choice.function.colour"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name"), UNKNOWN)
def test_an_unknown_field_is_left_out_and_named_at_every_level(fields: dict[str, Any], name: str) -> None:
    body, ignored = read({"messages": USER, "top_k": 3, **fields})
    assert (ignored, body.top_k) == ([name], 3)


@pytest.mark.parametrize(("fields", "name"), UNKNOWN)
def test_strict_fields_refuse_it(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ApiError) as caught:
        read({"messages": USER, **fields}, is_strict=True)
    assert caught.value.status == 400 and re.sub(r"\d+", "", caught.value.param or "") == name


def test_an_unknown_field_that_is_null_asks_for_nothing() -> None:
    assert read({"messages": USER, "colour": None})[1] == []
    with pytest.raises(ApiError, match="colour is not supported"):
        read({"messages": USER, "colour": None}, is_strict=True)


def test_known_values_are_kept_beside_unknown_ones() -> None:
    """The second reading of a body gives what the first would have given."""
    known = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1.0}]}], "stop": "1", "top_p": 1,
        "logit_bias": {"7": 1}, "metadata": {"a": "1"}, "structured_outputs": {"json": {"enum": [1.0, "2", True]}},
        "tools": [{"function": {"name": "f", "parameters": {"a": {"b": [1.0, {"c": "3"}]}}}}], "seed": 2**60,
    }  # fmt: skip
    assert read({**known, "colour": 1})[0] == read(known)[0]


class TestNames:
    """What a response header and a log line can hold."""

    def test_they_are_printable_ascii(self) -> None:
        _, ignored = read({"messages": USER, "a\r\nx-evil: 1": 1, "é\u202e": 2, "a b": 3, "a,b": 4})
        assert ignored == ["a??x-evil??1", "??", "a?b"]

    def test_they_are_short_and_few(self) -> None:
        fields = FieldReader()
        body = {"messages": USER, "x" * 1_000_000: 1, **{f"field{i}": 1 for i in range(10_000)}}
        fields.decode(json.dumps(body).encode(), ChatRequest)
        assert len(fields.ignored) == MOST_NAMES and max(map(len, fields.ignored)) == LONGEST_NAME
        ((_, header),) = fields.headers
        assert len(header) < MOST_NAMES * (LONGEST_NAME + 2) and header.endswith(b", ...")

    def test_a_field_of_many_messages_is_named_once(self) -> None:
        messages = [{**USER[0], "colour": i} for i in range(50)]
        assert read({"messages": messages})[1] == ["messages[].colour"]


HINTS = {
    "user": "me", "store": True, "service_tier": "flex", "verbosity": "low", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "safety_identifier": "s", "metadata": {"a": "b"}, "stream_interval": 4,
}  # fmt: skip


def test_hints_and_bookkeeping_are_accepted_also_by_strict_fields() -> None:
    returned = {
        "role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "tool_calls": None, "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"refusal": None},
        "reasoning_content": "hm", "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
    }  # fmt: skip
    tools = [{**TOOL, "cache_control": {"type": "ephemeral"}}]
    body, ignored = read({"messages": [*USER, returned], "tools": tools, **HINTS}, is_strict=True)
    assert ignored == []
    assert body.messages[1].as_dict() == {"role": "assistant", "content": "a", "reasoning": "hm"}


def test_reasoning_may_come_as_thinking_blocks() -> None:
    blocks = [
        {"type": "thinking", "thinking": "one"},
        {"type": "redacted_thinking"},
        {"type": "thinking", "thinking": "two"},
    ]
    body, _ = read({"messages": [{"role": "assistant", "content": "a", "thinking_blocks": blocks}]})
    assert body.messages[0].as_dict()["reasoning"] == "one\ntwo"


def test_empty_lists_ask_for_nothing() -> None:
    body, ignored = read({"messages": USER, "tools": [], "functions": [], "stop": [], "logit_bias": {}, "audio": {}})
    assert body.tools is None and ignored == []
    body.check_fields()


class Lax(BaseModel):
    """Pydantic's lax mode, in which vLLM reads its bodies."""

    max_tokens: int | None = None
    temperature: float | None = None
    echo: bool | None = None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", value) for value in ("3", " 3 ", "+3", "3.0", 3.0, "3.5", "x", "", "1e1", 3.5, "0x3", [3])],
        *[("temperature", value) for value in ("0.5", "1", " .5 ", "1.", "1e-1", "x", "", "1,5", [0.5])],
        *[("echo", value) for value in ("true", "False", "YES", "no", "on", "off", "1", "0", "t", "f", 1, 0, 1.0, 0.0)],
        *[("echo", value) for value in ("maybe", "", 2, 0.5, [True])],
    ],
)
def test_numbers_and_booleans_are_taken_as_vllm_takes_them(name: str, value: Any) -> None:
    try:
        expected = getattr(Lax.model_validate_json(json.dumps({name: value})), name)
    except ValueError:
        with pytest.raises(ApiError) as caught:
            read({"prompt": "abc", name: value}, CompletionRequest)
        assert caught.value.status == 400 and (caught.value.param or "").startswith(name)
    else:
        taken = getattr(read({"prompt": "abc", name: value}, CompletionRequest)[0], name)
        assert (taken, type(taken)) == (expected, type(expected))


def test_text_stays_text_where_text_is_expected() -> None:
    body, _ = read({"prompt": "12", "stop": ["1", "true"], "user": "7", "n": "2"}, CompletionRequest)
    assert (body.prompt, body.stop, body.user, body.n) == ("12", ["1", "true"], "7", 2)


def test_null_is_the_default_of_fields_that_are_never_null() -> None:
    tool = {"type": None, "function": {"name": "f"}, "custom": None}
    assert read({"messages": USER, "tools": [tool]})[0].tools[0].type == "function"


BODY: dict[str, Any] = {"messages": [{**USER[0], "mood": 1}], "max_tokens": 2, "colour": "red"}


class TestSaid:
    """Where a client and an operator find what was ignored."""

    @pytest.mark.parametrize("streams", [False, True])
    def test_in_a_header(self, live: Live, streams: bool) -> None:
        answer = live.post(CHAT, {**BODY, "stream": streams})
        assert answer.status_code == 200
        assert answer.headers["x-quire-ignored"] == "messages[].mood, colour"
        assert "x-quire-ignored" not in live.post(CHAT, {"messages": USER, "max_tokens": 2, **HINTS}).headers

    def test_of_content_parts_too(self, live: Live) -> None:
        part = {"type": "text", "text": "abc", "cache_control": {}, "colour": 1}
        answer = live.post(CHAT, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2})
        assert (answer.status_code, answer.headers["x-quire-ignored"]) == (200, "messages[].content[].colour")

    def test_but_not_what_the_template_reads(self, serving: Callable[..., Live]) -> None:
        """TranslateGemma's template reads the languages from the parts."""
        template = "{% for m in messages %}{% for p in m.content %}{{ p.to_lang }} {{ p.text }}{% endfor %}{% endfor %}"
        part = {"type": "text", "text": "abc", "to_lang": "es", "colour": 1}
        body = {"messages": [{"role": "user", "content": [part]}], "chat_template": template, "max_tokens": 1}
        answer = serving(trust_request_chat_template=True).post(CHAT, {**body, "return_prompt_text": True})
        assert answer.json()["prompt_text"] == "es abc"
        assert answer.headers["x-quire-ignored"] == "messages[].content[].colour"

    def test_of_a_refused_request_too(self, live: Live) -> None:
        answer = live.post(CHAT, {**BODY, "max_tokens": 0})
        assert (answer.status_code, answer.headers["x-quire-ignored"]) == (400, "messages[].mood, colour")

    def test_in_the_log_line(self, serving: Callable[..., Live]) -> None:
        stream = io.StringIO()
        set_up("json", "info", stream)
        live = serving()
        live.post(CHAT, BODY)
        live.post(CHAT, {"messages": USER, "max_tokens": 2})
        live.assert_idle()
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        said = [line.get("ignored") for line in lines if line["logger"] == "quire.access"]
        assert said == ["messages[].mood,colour", None]

    def test_in_a_metric_with_few_labels(self, serving: Callable[..., Live]) -> None:
        live = serving()
        for i in range(MOST_FIELD_LABELS + 5):
            live.post("/tokenize", {"prompt": "abc", f"field{i}": 1})
        live.post("/tokenize", {"prompt": "abc", "field0": 1})
        live.assert_idle()
        values = Scrape(live.client.get("/metrics").text).values
        name = "quire:request_fields_ignored_total"
        counts = {dict(labels)["field"]: value for (each, labels), value in values.items() if each == name}
        assert counts.pop("field0") == 2 and counts.pop("other") == 5
        assert set(counts.values()) == {1} and len(counts) == MOST_FIELD_LABELS - 1

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (CHAT, {"messages": USER, "max_tokens": 1}),
            (TEXT, {"prompt": "abc", "max_tokens": 1}),
            ("/v1/responses", {"input": "abc", "max_output_tokens": 1}),
            ("/v1/messages", {"messages": USER, "max_tokens": 1}),
            ("/v1/messages/count_tokens", {"messages": USER}),
            ("/v1/embeddings", {"input": "abc"}),
            ("/tokenize", {"prompt": "abc"}),
            ("/detokenize", {"tokens": [5]}),
            ("/v1/sessions", {"ttl": 1}),
        ],
    )
    def test_on_every_route(self, serving: Callable[..., Live], live: Live, path: str, body: dict[str, Any]) -> None:
        answer = live.post(path, {**body, "colour": 1})
        assert (answer.status_code, answer.headers["x-quire-ignored"]) == (200, "colour")
        refused = serving(strict_fields=True).post(path, {**body, "colour": 1})
        assert refused.status_code == 400 and "colour is not supported" in refused.text
