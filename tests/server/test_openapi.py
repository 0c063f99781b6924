"""schemathesis generates valid and invalid requests from the OpenAPI document: no 5xx, no hang, nothing left behind.
Responses, and each event of a stream, must match the document's schemas. Requests that violate them must be refused."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from quire.messages.sampling import SCALARS
from tests.server.conftest import Live

load_all_checks()
ALWAYS = CHECKS.get_by_names(
    ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)
WRONG = [*ALWAYS, CHECKS.get_one("negative_data_rejection")]
TOO_LATE = 408
"""A request with a timeout of 0 may end before it is found to be invalid."""
SECONDS = 60.0
"""A response that takes longer counts as a hang; requests of the tiny model take a few milliseconds."""


ALIASES = ("/v1/score", "/v1/rerank", "/v2/rerank")
"""Other paths of routes that are called already."""


class Fuzz:
    """Cases for all operations of a live server, and a count of the response statuses."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
        self._session = requests.Session()
        self.statuses: dict[GenerationMode, collections.Counter[int]] = collections.defaultdict(collections.Counter)

    def run(self, right: int, wrong: int, first: int = 0) -> None:
        """`count` valid and invalid cases of each operation that has a body; a few of the others."""
        for result in self._schema.get_all_operations():
            operation = result.ok()
            if operation.path in ALIASES:
                continue
            if operation.body:
                self._cases(operation, GenerationMode.POSITIVE, right, first)
                self._cases(operation, GenerationMode.NEGATIVE, wrong, first)
            else:
                self._cases(operation, GenerationMode.POSITIVE, 2, first)

    def _cases(self, operation: Any, mode: GenerationMode, count: int, first: int) -> None:
        checks = ALWAYS if mode is GenerationMode.POSITIVE else WRONG

        @seed(first)
        @settings(
            max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Case) -> None:
            if mode is GenerationMode.POSITIVE:
                make_sense(case.body, case.operation.path)
                if "session" in case.path_parameters:
                    case.path_parameters["session"] = self._session_for(case.operation.path)
                if case.operation.path.endswith("/feed"):
                    case.query["frames"] = 2  # it has no end otherwise
            response = case.call(base_url=self._live.url, session=self._session, timeout=SECONDS)
            self.statuses[mode][response.status_code] += 1
            case.validate_response(response, checks=ALWAYS if response.status_code == TOO_LATE else checks)

        ask()

    def _session_for(self, path: str) -> str:
        """An existing session, with an answer in it."""
        name = "fuzzed"
        address = f"{self._live.url}/v1/sessions"
        if path.endswith(("/generate", "/append", "/fork", "}")):
            requests.delete(f"{address}/{name}", timeout=SECONDS)
            requests.post(address, json={"id": name, "input": "abc"}, timeout=SECONDS)
        return name

    @property
    def total(self) -> int:
        return sum(sum(counts.values()) for counts in self.statuses.values())


def make_sense(body: Any, path: str) -> None:
    """Constraints a schema cannot express: fields that need each other, and roles that the tiny model's template
    has."""
    if not isinstance(body, dict):
        return
    if "stream_options" in body:
        body["stream"] = True
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    body.pop("chat_template", None)
    if path == "/tokenize":
        if body.get("messages"):
            body |= {"prompt": None, "add_special_tokens": None}
        else:
            body["prompt"] = body.get("prompt") or "abc"
            for name in (
                "messages",
                "add_generation_prompt",
                "continue_final_message",
                "chat_template_kwargs",
                "tools",
            ):
                body.pop(name, None)
    if path.startswith("/v1/sessions"):
        _make_sense_of_session(body)
    if path == "/v1/responses":  # ids of what is stored cannot be guessed
        body |= {"previous_response_id": None, "conversation": None}
        if body.get("background"):
            body["store"] = True
    if path.endswith(("/embeddings", "/pooling", "/classify")):
        body.pop("messages", None)
        body["input"] = body.get("input") or "abc"
    if path.endswith("/score"):
        body |= {"text_1": "abc", "text_2": ["abc"]}
    if path.endswith("/batch"):
        for name in ("stream", "stream_options", "tools", "functions", "n", "use_beam_search", "session_id"):
            body.pop(name, None)
        body["messages"] = [chat for chat in body.get("messages") or [] if chat]
        for chat in body["messages"]:
            make_sense({"messages": chat}, "")
        return
    for message in body.get("messages") or []:
        message["role"] = "user" if len(message.get("role", "")) % 2 else "assistant"
        message["content"] = message.get("content") or "abc"
        message.pop("tool_calls", None)


def _make_sense_of_session(body: dict[str, Any]) -> None:
    """Text is appended, without fields that apply only to messages."""
    if body.get("input"):
        body["input"] = "abc"
    for name in ("tools", "tool_choice", "chat_template_kwargs", "top_logprobs", "reasoning_effort", "session_id"):
        body.pop(name, None)
    body.update({"logprobs": None, "n": 1, "truncate_prompt_tokens": None} if "stream" in body else {})
    if "name" in body and "id" in body:
        body["name"] = None


@pytest.fixture
def fuzz(live: Live) -> Fuzz:
    return Fuzz(live)


def forget_sessions(live: Live) -> None:
    """Open sessions would hold their blocks."""
    while data := live.client.get("/v1/sessions").json()["data"]:
        for session in data:
            live.client.delete(f"/v1/sessions/{session['id']}")


def test_a_hundred_requests_and_more(fuzz: Fuzz, live: Live) -> None:
    fuzz.run(right=10, wrong=6)
    forget_sessions(live)
    live.assert_idle()
    assert fuzz.total > 120
    accepted = fuzz.statuses[GenerationMode.POSITIVE]
    assert accepted[200] > 0.4 * accepted.total(), "or the document says little of what is right"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_requests(fuzz: Fuzz, live: Live) -> None:
    fuzz.run(right=600, wrong=300, first=1)
    forget_sessions(live)
    live.assert_idle()
    print(fuzz.total, {mode.name: dict(counts) for mode, counts in fuzz.statuses.items()})
    assert fuzz.total > 5000


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_excludes_every_token_is_a_client_error(live: Live, streams: bool) -> None:
    constraint = {"structured_outputs": {"regex": "[a-c]+"}, "allowed_token_ids": live.server.tokenizer.encode("x")}
    refused = live.post("/v1/completions", {"prompt": "abc", "stream": streams, **constraint})
    assert refused.status_code == 400 and "excludes every token" in refused.json()["error"]["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_grammar_the_vocabulary_cannot_write_is_a_client_error(live: Live, streams: bool) -> None:
    constraint = {"structured_outputs": {"regex": "ab\U0001f600"}}
    refused = live.post("/v1/completions", {"prompt": "abc", "stream": streams, **constraint})
    if not streams:
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "structured_outputs"
    assert "no text has this form" in refused.text and '"code":400' in refused.text


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/completions", {"prompt": "abc", "repetition_penalty": 5e-324}, "repetition_penalty"),
        ("/tokenize", {"prompt": "abc", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "abc", "tools": [{"function": {"name": "f"}}]}, "tools"),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": [{"text": "hm"}]}]}, "input"),
    ],
)
def test_earlier_findings_are_refused(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    refused = live.post(path, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_message_whose_type_is_null_is_a_message(live: Live) -> None:
    item = {"type": None, "role": "user", "content": "abc"}
    assert live.post("/v1/responses", {"input": [item], "max_output_tokens": 1}).status_code == 200


def unfilled(schema: Any) -> Iterator[str]:
    """Placeholders in a schema that were never filled in."""
    if isinstance(schema, dict):
        for value in schema.values():
            yield from unfilled(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from unfilled(value)
    elif isinstance(schema, str) and schema.startswith("$"):
        yield schema


def test_the_document_describes_the_server(serving: Callable[..., Live]) -> None:
    live = serving(served_model_name=("one", "two"), max_samples=7)
    document = live.client.get("/openapi.json").json()
    assert list(unfilled(document)) == []
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["model"]["anyOf"][0]["enum"] == ["one", "two"]
    number = fields["n"]["anyOf"][0]
    assert (number["type"], number["minimum"], number["maximum"]) == (["integer", "string"], 1, 7)
    assert re.search(number["pattern"], "3") and not re.search(number["pattern"], "3x")
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == 256
    assert fields["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 127
    assert fields["best_of"] == {"enum": [1, None], "default": None}


def test_a_whole_number_may_be_written_as_a_float(live: Live) -> None:
    """In JSON, and in languages with one number type, 3.0 is 3."""
    body = b'{"prompt": [5.0, 6.0], "max_tokens": 3.0, "n": 1.0, "logit_bias": {"7": 1.0}, "ignore_eos": true}'
    answer = live.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.json()["usage"]["completion_tokens"] == 3
    for wrong in (b"3.5", b"1e300", b'"3x"', b"true"):
        body = b'{"prompt": "abc", "max_tokens": ' + wrong + b"}"
        refused = live.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("body", ["CompletionRequest", "ChatRequest", "MessagesRequest", "ResponsesRequest"])
def test_every_scalar_sampling_parameter_is_described(live: Live, body: str) -> None:
    fields = live.client.get("/openapi.json").json()["components"]["schemas"][body]["properties"]
    for scalar in SCALARS:
        (number, _) = fields[scalar.name]["anyOf"]
        assert number["description"] == scalar.help
        assert number.get("minimum", number.get("exclusiveMinimum")) == scalar.low
        assert number.get("maximum") == scalar.high
