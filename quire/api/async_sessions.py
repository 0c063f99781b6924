"""`AsyncLLM.sessions`: conversations by name, for asyncio programs. Names and meanings are those of `llm.sessions`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.api.session_input import TAIL_TOKENS, RenderText, SessionInput, SessionReader, is_messages
from quire.api.session_tools import calls_tools
from quire.engine import session_calls as calls
from quire.errors import SessionNotFoundError, ValidationError
from quire.messages.outputs import RequestOutput
from quire.messages.sampling import RequestOutputKind, SamplingParams, check_integer
from quire.sessions.keeper import KEEP, SessionInfo, SessionPage
from quire.sessions.log import owner_id, session_key
from quire.sessions.log.export import read_file, write_export

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncLLM

PAGE = 100
LONG_TEXT = 4096
"""Characters: text this long is read in a thread."""


class SessionTurn(NamedTuple):
    """A request that is a session's turn."""

    key: str
    """What the session goes by in the engine."""
    rewrites: bool = False
    """The session becomes the prompt first."""
    before: calls.SessionOp | None = None
    """To be done when the request is known to be right, before it is queued…"""
    undo: calls.SessionOp | None = None
    """…and to be done if the turn is not finished."""


class AsyncSessions:
    """The sessions of an engine; those of one tenant."""

    def __init__(self, llm: AsyncLLM, tenant: str = "") -> None:
        self._llm = llm
        self.tenant = tenant

    def of(self, tenant: str) -> AsyncSessions:
        """The sessions of a tenant. Tenants do not see each other's, and may use the same names."""
        return AsyncSessions(self._llm, tenant)

    async def create(
        self,
        name: str,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        tools: Sequence[Any] | None = None,
        ttl: float | None = None,
        meta: Mapping[str, str] | None = None,
        tenant: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        first_render: RenderText | None = None,
        is_new: bool = False,
    ) -> AsyncSession:
        """A new session, empty or beginning with a prompt or messages. `ttl`: seconds without use after which it
        ends. `first_render`: writes the messages, where the model's chat template alone is not to. `is_new`: the name
        was made up for it, and nobody is asked whether there is such a session."""
        if tenant is not None and tenant != self.tenant:
            return await self.of(tenant).create(
                name, prompt, messages=messages, tools=tools, ttl=ttl, meta=meta,
                chat_template_kwargs=chat_template_kwargs, first_render=first_render, is_new=is_new,
            )  # fmt: skip
        if prompt is not None and messages is not None:
            raise ValidationError("a session begins with a prompt or with messages, not with both", "messages")
        session = self._handle(name, tools)
        tokens: list[int] = []
        if (begin := messages if prompt is None else prompt) is not None:
            tokens = (await session.read(begin, [], 0, tools, chat_template_kwargs, first_render)).tokens
        salt = self._llm.inputs.salt_of(self.tenant)
        op = calls.CreateSession(session.key, tokens, salt, _ttl(ttl), _notes(meta or {}), is_new)
        session.found = _info(await self._llm.ask_sessions(op))
        return session

    async def resume(self, name: str) -> AsyncSession:
        """A session that is there; raises if there is none, or if it is lost. Its next turn loads what it needs."""
        session = self._handle(name)
        session.found = _info(await self._llm.ask_sessions(calls.TouchSession(session.key)))
        return session

    async def get(self, name: str) -> AsyncSession:
        """A session that is there, lost or not. It is not used by that."""
        session = self._handle(name)
        session.found = await session.info()
        return session

    async def page(self, after: str | None = None, limit: int = PAGE) -> SessionPage:
        """Up to `limit` sessions in the order they were made; `after`: those made after the one of that name."""
        key = None if after is None else session_key(self.tenant, after)
        answer = await self._llm.ask_sessions(calls.ListSessions(owner_id(self.tenant), key, limit))
        assert answer.page is not None
        return answer.page

    async def list(self, after: str | None = None, limit: int = PAGE) -> list[SessionInfo]:
        """The sessions of one page."""
        return (await self.page(after, limit)).sessions

    async def __aiter__(self) -> AsyncIterator[SessionInfo]:
        page = await self.page()
        while True:
            for info in page.sessions:
                yield info
            if page.after is None:
                return
            page = await self.page(page.sessions[-1].name)

    async def count(self) -> int:
        """How many there are."""
        answer = await self._llm.ask_sessions(calls.CountSessions(owner_id(self.tenant)))
        return answer.count or 0

    async def exists(self, name: str) -> bool:
        """Whether there is a session of that name."""
        try:
            await self.get(name)
        except (SessionNotFoundError, ValidationError):
            return False
        return True

    async def delete(self, name: str) -> None:
        """End a session. Its forks stay."""
        await self._llm.ask_sessions(calls.DeleteSession(session_key(self.tenant, name)))

    async def import_(
        self, source: str | os.PathLike[str] | bytes, name: str | None = None, *, ttl: float | None = None
    ) -> AsyncSession:
        """A session from a file that `export` wrote, or from its bytes, under its own name or another."""
        data = source if isinstance(source, bytes) else await asyncio.to_thread(read_file, source)
        salt = self._llm.inputs.salt_of(self.tenant)
        answer = await self._llm.ask_sessions(calls.ImportSession(data, self.tenant, name, salt, _ttl(ttl)))
        session = self._handle(_info(answer).name)
        session.found = _info(answer)
        return session

    def handle(self, name: str, tools: Sequence[Any] | None = None) -> AsyncSession:
        """A session by its name, which nobody has looked for yet."""
        return self._handle(name, tools)

    def _handle(self, name: str, tools: Sequence[Any] | None = None) -> AsyncSession:
        return AsyncSession(self._llm, self, name, session_key(self.tenant, name), tools)


class AsyncSession:
    """One session."""

    def __init__(
        self, llm: AsyncLLM, sessions: AsyncSessions, name: str, key: str, tools: Sequence[Any] | None = None
    ) -> None:
        self._llm = llm
        self._sessions = sessions
        self._tools = tools
        self.name = name
        self.key = key
        """What it goes by in the engine."""
        self.found: SessionInfo | None = None
        """How it was when it was made, or looked for."""

    async def append(
        self,
        given: SessionInput,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        first_render: RenderText | None = None,
    ) -> SessionInfo:
        """Add text, token ids or messages. They are durable when this returns, and computed with the next turn."""
        tools = self._tools if tools is None and is_messages(given) else tools
        answer = await self._llm.ask_sessions(calls.ReadTokens(self.key, -TAIL_TOKENS))
        length = _info(answer).num_tokens
        addition = await self.read(given, answer.tokens or [], length, tools, chat_template_kwargs, first_render)
        self._tools = tools if tools is not None else self._tools
        return _info(await self._llm.ask_sessions(calls.AppendTokens(self.key, addition.tokens, addition.drop, length)))

    async def read(
        self,
        given: SessionInput,
        tail: Sequence[int],
        length: int,
        tools: Sequence[Any] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        first_render: RenderText | None,
    ) -> Any:
        """What is to be added to a session of so many tokens that ends with `tail`."""
        inputs = self._llm.inputs
        usual = None if inputs.tokenizer is None else self._llm.renderer.render_text
        reader = SessionReader(inputs, usual)

        def read() -> Any:
            addition = reader.read(
                given, tail, tools=tools, chat_template_kwargs=chat_template_kwargs, first_render=first_render
            )
            reader.check_room(length, addition)
            return addition

        is_short = not is_messages(given) and len(given) < LONG_TEXT if hasattr(given, "__len__") else True
        return read() if is_short else await asyncio.to_thread(read)

    async def generate(
        self,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """One turn: the session goes on, and what it says is part of it. After a call of one of `tools` it sleeps."""
        params = (self._llm.get_default_sampling_params() if params is None else params).clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        async with aclosing(self.stream(params, tools=tools, request_id=request_id, priority=priority)) as outputs:
            async for output in outputs:
                last = output
        return last

    async def stream(
        self,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, as it comes. Leaving early aborts the turn, and the session is as it was before."""
        self._tools = tools if tools is not None else self._tools
        tokens = await self.tokens()
        self._llm.inputs.check_room(len(tokens), "session")
        run = self._llm.run(tokens, params, request_id, priority, self._sessions.tenant, SessionTurn(self.key))
        async with aclosing(run) as outputs:
            async for output in outputs:
                if output.finished and self._tools:
                    await self._sleep_after_calls(len(output.prompt_token_ids))
                yield output

    async def _sleep_after_calls(self, start: int) -> None:
        answer = await self._llm.ask_sessions(calls.ReadTokens(self.key, start))
        if answer.tokens and self._tools and calls_tools(answer.tokens, self._tools, self._llm.renderer):
            await self.suspend(wait=False)

    async def prepare(
        self,
        given: SessionInput | None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        first_render: RenderText | None = None,
    ) -> tuple[list[int], SessionTurn]:
        """A turn that begins by appending: its prompt, and what adds to the session once the request is queued. If
        the turn does not come to its end, the session is as it was before."""
        answer = await self._llm.ask_sessions(calls.ReadTokens(self.key))
        tokens, length = answer.tokens or [], _info(answer).num_tokens
        if given is None:
            self._llm.inputs.check_room(length, "session")
            return tokens, SessionTurn(self.key)
        addition = await self.read(given, tokens[-TAIL_TOKENS:], length, tools, chat_template_kwargs, first_render)
        kept = tokens[: length - addition.drop]
        prompt = kept + addition.tokens
        if not addition.tokens:
            return prompt, SessionTurn(self.key)
        added = calls.AppendTokens(self.key, addition.tokens, addition.drop, length)
        undo = calls.AppendTokens(self.key, tokens[len(kept) :], len(addition.tokens), len(prompt))
        return prompt, SessionTurn(self.key, before=added, undo=undo)

    async def suspend(self, wait: bool = True) -> SessionInfo:
        """Leave the device. With `wait`, when this returns all there was to save is saved."""
        return _info(await self._llm.ask_sessions(calls.SuspendSession(self.key, wait)))

    async def fork(self, name: str, at: int | None = None) -> AsyncSession:
        """A session with the same first tokens (all of them, unless said otherwise). They share what they can."""
        made = self._sessions.handle(name, self._tools)
        if at is not None:
            check_integer("at", at, 0)
        made.found = _info(await self._llm.ask_sessions(calls.ForkSession(self.key, made.key, at)))
        return made

    async def export(self, path: str | os.PathLike[str]) -> None:
        """Write the session to a file: its tokens and notes, not its KV."""
        await asyncio.to_thread(write_export, await self.exported(), path)

    async def exported(self) -> bytes:
        """What `export` writes."""
        answer = await self._llm.ask_sessions(calls.ExportSession(self.key))
        return answer.data or b""

    async def update(self, *, ttl: float | None = KEEP, meta: Mapping[str, str] | None = None) -> SessionInfo:
        """Another time to live (None: for ever), or other notes."""
        keeps = ttl is KEEP
        notes = None if meta is None else _notes(meta)
        op = calls.UpdateSession(self.key, None if keeps else _ttl(ttl), keeps, notes)
        return _info(await self._llm.ask_sessions(op))

    async def recover(self) -> SessionInfo:
        """Accept what is left of a session that is lost."""
        return _info(await self._llm.ask_sessions(calls.RecoverSession(self.key)))

    async def delete(self) -> None:
        """End the session. Its forks stay."""
        await self._sessions.delete(self.name)

    async def tokens(self) -> list[int]:
        """All its tokens."""
        return (await self._llm.ask_sessions(calls.ReadTokens(self.key))).tokens or []

    async def text(self) -> str:
        """All its tokens as text, special ones too."""
        tokenizer = await self._llm.get_tokenizer()
        text: str = tokenizer.decode(await self.tokens(), skip_special_tokens=False)
        return text

    async def info(self) -> SessionInfo:
        """How it is."""
        return _info(await self._llm.ask_sessions(calls.GetSession(self.key)))

    def __repr__(self) -> str:
        return f"AsyncSession({self.name!r})"


def _info(answer: calls.SessionAnswer) -> SessionInfo:
    assert answer.info is not None
    return answer.info


def _notes(meta: Mapping[str, str]) -> dict[str, str]:
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in meta.items()):
        raise ValidationError("meta maps text to text", "meta")
    return dict(meta)


def _ttl(ttl: float | None) -> float | None:
    if ttl is not None and not isinstance(ttl, (int, float)):
        raise ValidationError(f"ttl is a number of seconds, got {ttl!r}", "ttl", ttl)
    return None if ttl is None else float(ttl)
