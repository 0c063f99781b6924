"""The official client, sync and async, behind one interface, so that a test runs with both."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.server.conftest import MODEL, Live

USER: list[Any] = [{"role": "user", "content": "abc"}]
CHAT = "chat.completions.create"
TEXT = "completions.create"
RESPONSES = "responses.create"


class Client(Protocol):
    """What a test needs of a client. Methods are named as on the client itself: "chat.completions.create"."""

    def call(self, method: str, **fields: Any) -> Any:
        """The response in one piece."""

    def stream(self, method: str, **fields: Any) -> list[Any]:
        """All events of a streamed response."""

    def leave(self, method: str, after: int, **fields: Any) -> list[Any]:
        """The first events of a stream that the client then closes."""


class SyncClient:
    """`openai.OpenAI`."""

    def __init__(self, live: Live, **settings: Any) -> None:
        self._client = live.openai(**settings)

    def call(self, method: str, **fields: Any) -> Any:
        return _method(self._client, method)(**_named(method, fields))

    def stream(self, method: str, **fields: Any) -> list[Any]:
        with self.call(method, stream=True, **fields) as events:
            return list(events)

    def leave(self, method: str, after: int, **fields: Any) -> list[Any]:
        with self.call(method, stream=True, **fields) as events:
            return [next(events) for _ in range(after)]


class AsyncClient:
    """`openai.AsyncOpenAI`."""

    def __init__(self, live: Live, **settings: Any) -> None:
        self._settings = {"base_url": f"{live.url}/v1", "api_key": "none", "max_retries": 0, **settings}

    def call(self, method: str, **fields: Any) -> Any:
        return asyncio.run(self._call(method, fields))

    def stream(self, method: str, **fields: Any) -> list[Any]:
        return asyncio.run(self._stream(method, fields, None))

    def leave(self, method: str, after: int, **fields: Any) -> list[Any]:
        return asyncio.run(self._stream(method, fields, after))

    async def _call(self, method: str, fields: dict[str, Any]) -> Any:
        async with openai.AsyncOpenAI(**self._settings) as client:
            return await _method(client, method)(**_named(method, fields))

    async def _stream(self, method: str, fields: dict[str, Any], count: int | None) -> list[Any]:
        got: list[Any] = []
        async with openai.AsyncOpenAI(**self._settings) as client:
            stream = await _method(client, method)(stream=True, **_named(method, fields))
            async with stream as events:
                async for event in events:
                    got.append(event)
                    if len(got) == count:
                        break
        return got


def _method(client: Any, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = operator.attrgetter(name)(client)
    return found


def _named(method: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Adds the model's name, which the client requires."""
    return fields if method.startswith("models.") else {"model": MODEL, **fields}


def text_of(chunks: Iterable[Any], index: int = 0) -> str:
    """The concatenated text of streamed completions."""
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def assembled(chunks: Iterable[Any]) -> Any:
    """Chat chunks, assembled by the client's own helper."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    return state.current_completion_snapshot
