"""Events that are written where a step's outputs are taken have the bytes that the routes would have sent."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import pytest

from quire.api.output_stream import OutputStream
from quire.messages.outputs import Finished, RequestOutput, StepOutputs
from quire.messages.plan import TokenLogprobs
from quire.output.detokenizer import Vocabulary
from quire.output.processor import OutputProcessor
from quire.output.tracked import TextSink
from quire.server.app import make_app
from quire.server.config import ServerConfig
from quire.server.context import ServerContext
from quire.server.http import CHUNKS, EventTemplate
from quire.server.protocol.chat import ChatChunk, ChatMessageDelta, ChunkChoice
from quire.server.protocol.completions import CompletionChoice, CompletionResponse
from tests.server.conftest import MODEL, Host, Live

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
ID = 'x-"%s\\u0000"'


class SteppedLLM:
    """The engine's place: a step yields a token for each sequence, and the next waits until the route has sent it."""

    def __init__(self, llm: Any, answer: str, has_sink: bool) -> None:
        self._llm = llm
        self._answer = answer
        self._has_sink = has_sink

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def run(
        self, prompt: Any, params: Any, request_id: Any, priority: int, tenant: str, turn: Any, shares_id: bool,
        sink: TextSink | None, adapters: Any = (),
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        request, text = self._llm.inputs.make("key", prompt, params, 0.0, 0, "")
        outputs = OutputProcessor(Vocabulary(self._llm.inputs.tokenizer))
        outputs.add(request, text)
        stream = OutputStream("key", "key", sink if self._has_sink else None)
        stream.is_delta = True
        if stream.sink is not None:
            outputs.tracked("key").sink = stream
        feeder = asyncio.ensure_future(self._feed(outputs, stream, params))
        try:
            while not stream.is_finished:
                yield await stream.take()
        finally:
            feeder.cancel()

    async def _feed(self, outputs: OutputProcessor, stream: OutputStream, params: Any) -> None:
        tokens = self._llm.inputs.tokenizer.encode(self._answer, add_special_tokens=False)
        keys = [("key", index) for index in range(params.n)]
        for at, token in enumerate(tokens):
            while stream._reader is None or stream._reader.done():
                await asyncio.sleep(0)
            step = StepOutputs(keys=keys, tokens=[token] * params.n)
            if params.logprobs is not None:
                entry = TokenLogprobs([token, *range(params.logprobs)], [-0.5] * (1 + params.logprobs), 1)
                step.logprobs = dict.fromkeys(range(params.n), entry)
            if at == len(tokens) - 1:
                step.finished = [Finished(key, "length") for key in keys]
            views, _ = outputs.process(step)
            for view in views:
                stream.put(view)
            if stream.is_ended:
                return


class Connection:
    """A client's connection; `refuses`: how often it is too slow for a direct write."""

    def __init__(self, refuses: int = 0) -> None:
        self.parts: list[bytes] = []
        self.direct = 0
        self._refuses = refuses
        self._is_started = False

    def is_ready(self) -> bool:
        self._refuses -= 1
        return self._is_started and self._refuses < 0

    def write(self, parts: Sequence[bytes]) -> None:
        self.parts += parts
        self.direct += len(parts)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            self._is_started = True
        elif message["body"]:
            self.parts.append(message["body"])


async def ask(context: ServerContext, path: str, body: dict[str, Any], connection: Connection) -> list[str]:
    """The parts of the answer, without times and generated ids."""
    data, sent = msgspec.json.encode(body), asyncio.Event()

    async def receive() -> Any:
        if sent.is_set():
            await asyncio.Event().wait()
        sent.set()
        return {"type": "http.request", "body": data, "more_body": False}

    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1", CHUNKS: connection,
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", ID.encode())],
    }  # fmt: skip
    await make_app(context)(scope, receive, connection.send)
    assert CHUNKS not in scope  # it would be a reference cycle
    varying = r'"(created|created_at)":\d+|"metrics":\{[^}]*\}|(call|msg|rs|fc|toolu)_\w{8,}'
    return [re.sub(varying, "", part.decode()) for part in connection.parts]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True, **fields}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 99, **fields}


MESSAGES = ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 99, "stream": True})
THINK = {"reasoning_parser": "deepseek_r1"}
USAGE = {"stream_options": {"include_usage": True}}

DIRECT: dict[str, tuple[tuple[str, dict[str, Any]], str, dict[str, Any]]] = {
    "chat": (chat(), 'quotes " and \\ and \n, ünïcode €, <tags> and 🙂 end', {}),
    "chat-usage": (chat(**USAGE, return_metrics=True), "a b c", {}),
    "chat-stop": (chat(stop=["END", "FIN"]), "some text, then END and more", {}),
    "chat-tools": (
        chat(tools=[{"type": "function", "function": TOOL}]),
        f"well {CALL}",
        {"tool_call_parser": "hermes"},
    ),
    "chat-reasoning": (chat(**USAGE), "why</think>because", THINK),
    "completion": (completion(), 'quotes " and \\ and \n, ünïcode € and 🙂 end', {}),
    "completion-echo": (completion(echo=True, stop=["END"], **USAGE), "some text, then END and more", {}),
    "messages": (MESSAGES, "hello ünïcode €", {}),
    "messages-reasoning": (MESSAGES, "why</think>because", THINK),
}
PLAIN: dict[str, tuple[tuple[str, dict[str, Any]], str, dict[str, Any]]] = {
    "several sequences": (chat(n=2), "abc", {}),
    "logprobs": (chat(logprobs=True, top_logprobs=1), "abc", {}),
    "token ids": (chat(return_token_ids=True), "abc", {}),
    "continuous usage": (chat(stream_options={"include_usage": True, "continuous_usage_stats": True}), "abc", {}),
    "completion with logprobs": (completion(logprobs=1), "abc", {}),
    "completion with token ids": (completion(return_token_ids=True), "abc", {}),
    "completions of two prompts": (completion(prompt=["a", "b"]), "abc", {}),
}  # fmt: skip


def answers(host: Host, case: Any, has_sink: bool, connection: Connection) -> list[str]:
    (path, body), answer, settings = case

    async def work() -> list[str]:
        context = ServerContext(
            host.llm, ServerConfig(served_model_name=(MODEL,), enable_tool_preamble=False, **settings)
        )
        context.llm = SteppedLLM(host.llm, answer, has_sink)  # type: ignore[assignment]
        return await ask(context, path, body, connection)

    return asyncio.run_coroutine_threadsafe(work(), host.loop).result(60)


@pytest.mark.parametrize("name", DIRECT)
def test_direct_events_are_those_of_the_route(host: Host, name: str) -> None:
    plain = answers(host, DIRECT[name], False, Connection())
    connection = Connection()
    assert answers(host, DIRECT[name], True, connection) == plain
    assert connection.direct >= 1 and len(plain) > 3
    slow = Connection(refuses=2)
    assert answers(host, DIRECT[name], True, slow) == plain
    assert 0 < slow.direct <= connection.direct


@pytest.mark.parametrize("name", PLAIN)
def test_outputs_with_more_than_text_go_through_the_route(host: Host, name: str) -> None:
    connection = Connection()
    answers(host, PLAIN[name], True, connection)
    assert connection.direct == 0 and connection.parts[-1] == b"data: [DONE]\n\n"


def test_an_event_that_cannot_be_encoded_ends_its_stream(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EventTemplate, text: str) -> bytes:
        raise ValueError("no")

    monkeypatch.setattr(EventTemplate, "fill", fail)
    *_, last, done = "".join(answers(host, DIRECT["chat"], True, Connection())).strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500 and done == "data: [DONE]"


TEXTS = [
    "",
    "plain",
    'a "quote" \\ \\u0000 "\\u0000"',
    "\0\x01\x1f\x7f\n\r\t",
    "€ 🙂 ﬀ \u2028",
    "</script>",
    "%s %(x)s {}",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["model", 'x"\\u0000"y', "%d\\", "ünï"])
def test_a_template_is_the_encoded_event(text: str, name: str) -> None:
    def chunk(content: str) -> ChatChunk:
        choice = ChunkChoice(0, ChatMessageDelta(content=content), None, None)
        return ChatChunk(ID, "chat.completion.chunk", 1, name, [choice])

    def response(content: str) -> CompletionResponse:
        return CompletionResponse(ID, "text_completion", 1, name, [CompletionChoice(0, content, None, None, None)])

    for make in (chunk, response):
        plain = b"data: " + msgspec.json.encode(make(text)) + b"\n\n"
        assert EventTemplate(make(EventTemplate.TEXT)).fill(text) == plain


def test_a_template_needs_a_text() -> None:
    with pytest.raises(ValueError, match="TEXT"):
        EventTemplate({"text": "other"})


def test_on_the_wire_each_event_is_a_chunk_of_the_plain_encoder(live: Live) -> None:
    body = json.dumps(
        {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "stream": True, "temperature": 0}
    ).encode()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock, sock.makefile("rb") as answer:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        sock.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        while answer.readline() != b"\r\n":
            pass
        chunks = []
        while size := int(answer.readline(), 16):
            chunks.append(answer.read(size))
            assert answer.readline() == b"\r\n"
    assert chunks.pop() == b"data: [DONE]\n\n"
    text = ""
    for chunk in chunks:
        event = msgspec.json.decode(chunk.removeprefix(b"data: "), type=CompletionResponse)
        assert chunk == b"data: " + msgspec.json.encode(event) + b"\n\n"
        text += event.choices[0].text
    whole = live.post("/v1/completions", {**json.loads(body), "stream": False}).json()
    assert text == whole["choices"][0]["text"]
