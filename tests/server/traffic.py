"""Requests of every kind, sent by many concurrent users, and the outcome of each."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

from quire.cli.bench.load.http import Host, LostConnectionError, WholeResponse
from tests.server.attacked_server import KEYS, AttackedServer, raw_request, request_head

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
KINDS = ("text", "stream", "chat", "chat stream", "samples", "embed", "responses", "messages")
WITH_FORMS = ("form", "tool")
PATIENCE = 120.0
"""Seconds after which a request counts as unanswered."""
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"of": {"type": "string", "maxLength": 5}}, "required": ["of"]},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["a"]}
GARBAGE: list[tuple[str, bytes, int]] = [
    (TEXT, b"{", 400),
    (TEXT, b'{"prompt": [-1]}', 400),
    (TEXT, b'{"prompt": "abc", "temperature": 1e999}', 400),
    (TEXT, b'{"prompt": "abc", "structured_outputs": {"regex": "("}}', 400),
    (CHAT, b'{"messages": ' + b"[" * 3000, 400),
    (
        CHAT,
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://a.example"}]}]}',
        400,
    ),
    (EMBED, b'{"input": []}', 400),
    ("/nothing", b"{}", 404),
]


@dataclass(frozen=True)
class Ask:
    """A request, and how many tokens its response must have; 0: any number."""

    path: str
    body: dict[str, Any]
    tokens: int = 0

    @property
    def data(self) -> bytes:
        return json.dumps(self.body).encode()


def draw(rng: random.Random, with_forms: bool = True) -> Ask:
    """A random request that a server must answer."""
    kind = rng.choice([*KINDS, *(WITH_FORMS if with_forms else ())])
    size, words = rng.randint(1, 60), "the world " * rng.randint(1, 12) + str(rng.randint(0, 30))
    fields: dict[str, Any] = {"temperature": rng.choice([0, 1]), "max_tokens": size, "ignore_eos": True}
    messages = [{"role": "user", "content": words}]
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    match kind:
        case "text":
            return Ask(TEXT, {"prompt": words, **fields}, size)
        case "stream":
            return Ask(TEXT, {"prompt": words, **fields, **streamed}, size)
        case "chat":
            return Ask(CHAT, {"messages": messages, "logprobs": True, "top_logprobs": 2, **fields}, size)
        case "chat stream":
            return Ask(CHAT, {"messages": messages, **fields, **streamed}, size)
        case "samples":
            return Ask(TEXT, {"prompt": [words, "abc"], **fields, **streamed, "n": 3, "temperature": 1}, 6 * size)
        case "embed":
            return Ask(EMBED, {"input": [words, "abc"] if size % 2 else [[5, 6, 7], [8]]})
        case "responses":
            return Ask(RESPONSES, {"input": words, "max_output_tokens": max(16, size)})
        case "messages":
            return Ask(MESSAGES, {"model": "tiny", "messages": messages, "max_tokens": size})
        case "form":
            constraint = rng.choice(
                [{"regex": f"[a-z]{{1,{size % 9 + 1}}}"}, {"json": SCHEMA}, {"choice": ["ab", "cd"]}]
            )
            return Ask(TEXT, {"prompt": words, "max_tokens": 40, "structured_outputs": constraint})
        case _:
            return Ask(CHAT, {"messages": messages, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"})


class Users:
    """Clients of one server, and a count of how their requests ended."""

    def __init__(self, attacked: AttackedServer, seed: int) -> None:
        self.attacked = attacked
        self.rng = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._hosts = [Host(attacked.url, {"Authorization": f"Bearer {key}"}) for key in KEYS]

    async def ask(self, ask: Ask) -> str:
        """The outcome: "answered", "failed" (an error that says the engine died), "busy", or a fault of the server."""
        answer = WholeResponse()
        try:
            async with asyncio.timeout(PATIENCE):
                await self.rng.choice(self._hosts).post(ask.path, ask.data, answer)
            end = verdict(ask, answer.status, bytes(answer.body))
        except LostConnectionError as error:
            end = f"lost: {error}"
        except TimeoutError:
            end = "left without an answer"
        return self._note(end, ask)

    async def read(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a request with the first key; None if the server is busy."""
        answer = WholeResponse()
        async with asyncio.timeout(PATIENCE):
            await self._hosts[0].post(path, json.dumps(body).encode(), answer)
        if answer.status == 429:
            self.ends["busy"] += 1
            return None
        if answer.status != 200:
            self.wrong.append(f"HTTP {answer.status}: {bytes(answer.body)[:300]!r} ({path} {body})")
            return None
        read: dict[str, Any] = json.loads(bytes(answer.body))
        return read

    async def delete(self, path: str) -> None:
        """Delete a session of the first key."""
        reader, writer = await asyncio.open_connection(*self.attacked.address)
        writer.write(request_head(path, None, "connection: close", method="DELETE"))
        async with asyncio.timeout(PATIENCE):
            head = await reader.read()
        writer.close()
        if not head.startswith(b"HTTP/1.1 200"):
            self.wrong.append(f"DELETE {path}: {head[:300]!r}")

    async def send_garbage(self) -> None:
        path, data, status = self.rng.choice(GARBAGE)
        answer = WholeResponse()
        async with asyncio.timeout(PATIENCE):
            await self._hosts[0].post(path, data, answer)
        # Without an engine, or with a full queue, some of them get only this status.
        self._note("refused" if answer.status in (status, 429, 503) else f"HTTP {answer.status}", Ask(path, {}))

    async def disconnect(self, ask: Ask, seconds: float = 0.05) -> None:
        """Disconnect at any moment: within the request, while it is queued, within the response, cleanly or by
        reset."""
        data = raw_request(ask.path, ask.body)
        reader, writer = await asyncio.open_connection(*self.attacked.address)
        try:
            writer.write(data if self.rng.random() < 0.9 else data[: self.rng.randint(1, len(data) - 1)])
            with suppress(asyncio.TimeoutError):
                async with asyncio.timeout(self.rng.random() * seconds):
                    await reader.read(self.rng.choice([1, 300, 5000]))
                    await reader.read(self.rng.choice([1, 300, 5000]))
        except ConnectionError:
            pass
        finally:
            if self.rng.random() < 0.5:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
        self.ends["hung up"] += 1

    async def talk_nonsense(self) -> None:
        """Send invalid bytes."""
        rng = self.rng
        pieces = [
            rng.randbytes(200),
            request_head(TEXT, 50) + b"{",
            b"GET /health HTTP/1.1\r\n\r\n" * 3 + b"\0",
            b"\r\n" * 50,
        ]
        reader, writer = await asyncio.open_connection(*self.attacked.address)
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(0.2):
                writer.write(rng.choice(pieces))
                await reader.read(1000)
        writer.close()
        self.ends["nonsense"] += 1

    def close(self) -> None:
        for host in self._hosts:
            host.close()

    def _note(self, end: str, ask: Ask) -> str:
        if end in ("answered", "failed", "busy", "refused"):
            self.ends[end] += 1
        else:
            self.wrong.append(f"{end} ({ask.path} {ask.body})")
        return end


@contextmanager
def users_of(attacked: AttackedServer, seed: int) -> Iterator[Users]:
    users = Users(attacked, seed)
    yield users
    users.close()
    assert not users.wrong, (len(users.wrong), users.wrong[:5], users.ends)


def verdict(ask: Ask, status: int, body: bytes) -> str:
    """How a request ended, by its response."""
    if status in (429, 503):
        return (
            {429: "busy", 503: "failed"}[status] if json.loads(body)["error"]["message"] else "an error without words"
        )
    if status != 200:
        return f"HTTP {status}: {body[:300]!r}"
    if not ask.body.get("stream"):
        usage = json.loads(body).get("usage")
    else:
        *events, done, rest = body.split(b"\n\n")
        if done != b"data: [DONE]" or rest:
            return f"a stream that ends with {body[-300:]!r}"
        last = json.loads(events[-1].removeprefix(b"data: "))
        if "error" in last:
            return "failed" if last["error"]["code"] == 503 else f"{last}"
        usage = last["usage"]
    if ask.tokens and usage["completion_tokens"] != ask.tokens:
        return f"{usage} where {ask.tokens} tokens were asked for"
    return "answered"
