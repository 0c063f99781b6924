"""`AsyncLLM.sessions`: conversations by name, for asyncio programs. The interface is that of `llm.sessions`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from quire.api.adapters import LoRAChoice
from quire.api.chat_media import has_media
from quire.api.output_stream import OutputStream
from quire.api.session_input import (
    TAIL_TOKENS,
    Addition,
    RenderText,
    SessionInput,
    SessionReader,
    calls_tools,
    check_turn,
    is_messages,
)
from quire.api.session_media import stored_media
from quire.engine import session_calls as calls
from quire.errors import (
    EngineDeadError,
    QuireError,
    SessionLostError,
    SessionNotFoundError,
    ValidationError,
)
from quire.messages.media import MediaItem
from quire.messages.outputs import RequestOutput
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind, SamplingParams, check_integer
from quire.sessions.keeper import KEEP, SessionInfo, SessionPage
from quire.sessions.log import owner_id, session_key
from quire.sessions.log.export import read_file, write_export
from quire.sessions.log.state import SessionUse, checked_meta, checked_ttl

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

PAGE = 100
LONG_TEXT = 4096
"""Characters: a text this long is tokenized in a thread."""


class SessionTurn(NamedTuple):
    """A request that is a turn of a session."""

    key: str
    """The session's key in the engine."""
    rewrites: bool = False
    """The session is replaced by the prompt first."""
    append: calls.SessionOp | None = None
    """Run once the request is checked, before it is queued…"""
    take_back: calls.SessionOp | None = None
    """…and its inverse, run if the turn does not finish."""
    items: tuple[MediaItem, ...] = ()
    """Images of the session, as far as their pixels are held."""

    async def begin(self, llm: AsyncLLM, request: NewRequest) -> None:
        """Make a checked request a turn of the session, and write what precedes it."""
        check_turn(request.params, rewrites=self.rewrites)  # before anything is written
        request.session = self.key
        if self.rewrites:
            await llm.call_sessions(calls.RewriteSession(self.key, request.prompt, request.salt, stored_media(request)))
        elif self.append is not None:
            try:
                await self._append(llm, request, self.append)
            except (asyncio.CancelledError, EngineDeadError):  # the operation was sent, and may be or have been done
                self.undo(llm)
                raise

    async def _append(self, llm: AsyncLLM, request: NewRequest, append: calls.SessionOp) -> None:
        """Write what precedes the turn, once: the engine may die when it has been written, or before."""
        try:
            await llm.call_sessions(append)
        except EngineDeadError as error:
            if not error.was_sent:
                raise
            try:
                if (await llm.call_sessions(calls.ReadTokens(self.key))).tokens != request.prompt:
                    await llm.call_sessions(append)
            except SessionNotFoundError:  # it died with its engine; the prompt is its whole content
                await llm.call_sessions(
                    calls.RewriteSession(self.key, request.prompt, request.salt, stored_media(request))
                )

    async def cut_at_stop(
        self, llm: AsyncLLM, stream: OutputStream, output: RequestOutput, written: Sequence[int]
    ) -> None:
        """If a stop string was found in this process, cut the session there: the engine may have generated more. If the
        engine has died since, write the output, which it did not."""
        sequence, request = output.outputs[0], stream.request
        if sequence.finish_reason != "stop" or not isinstance(sequence.stop_reason, str):
            return
        assert request is not None and stream.engine is not None
        try:
            await llm.call_sessions(calls.CutSession(self.key, len(request.prompt) + len(written)))
        except SessionNotFoundError:
            if not stream.engine.death:
                raise
        if stream.engine.death:
            whole = [*request.prompt, *written]
            await llm.call_sessions(calls.RewriteSession(self.key, whole, request.salt, stored_media(request)))

    def undo(self, llm: AsyncLLM) -> None:
        """Take back what the turn appended, without waiting for it."""
        if self.take_back is not None:
            llm.send_session_op(self.key, self.take_back)

    async def suspend(self, llm: AsyncLLM) -> None:
        """Free the session's device blocks until its next turn."""
        await llm.call_sessions(calls.SuspendSession(self.key))


@dataclass
class BranchTurn:
    """A turn whose session is made for it, as a fork of another session if that still exists, and becomes the prompt.

    If the turn does not finish, its session is deleted. Where a session cannot be made, for want of room or because an
    engine died, the request runs without one: all that is lost is KV that a later turn would find.
    """

    key: str
    source: str = ""
    """The key of the session to fork; empty: none."""
    ttl: float | None = None
    """The new session's time to live; a fork has its source's."""
    has_session: bool = False

    async def begin(self, llm: AsyncLLM, request: NewRequest) -> None:
        """Make the session, and a checked request its turn."""
        check_turn(request.params, rewrites=True)
        self.has_session = True
        try:
            await self._make(llm, request)
        except BaseException as error:  # the operation was sent, and may be or have been done
            self.undo(llm)
            if not isinstance(error, QuireError):
                raise
            logger.warning("request %s runs without a session: %s", request.id, error)
            return
        request.session = self.key

    async def _make(self, llm: AsyncLLM, request: NewRequest) -> None:
        if self.source:
            try:
                await llm.call_sessions(calls.ForkSession(self.source, self.key))
                await llm.call_sessions(
                    calls.RewriteSession(self.key, request.prompt, request.salt, stored_media(request))
                )
                return
            except (SessionNotFoundError, SessionLostError):
                pass
        media = stored_media(request)
        op = calls.CreateSession(self.key, request.prompt, request.salt, self.ttl, {}, is_new=True, media=media)
        await llm.call_sessions(op)

    async def cut_at_stop(
        self, llm: AsyncLLM, stream: OutputStream, output: RequestOutput, written: Sequence[int]
    ) -> None:
        """As for any turn."""
        if self.has_session:
            await SessionTurn(self.key).cut_at_stop(llm, stream, output, written)

    def undo(self, llm: AsyncLLM) -> None:
        """Delete the session, without waiting for it."""
        if self.has_session:
            self.has_session = False
            llm.send_session_op(self.key, calls.DeleteSession(self.key))

    async def suspend(self, llm: AsyncLLM) -> None:
        """Save the session's KV to lower tiers, without waiting for it, and free its device blocks."""
        if self.has_session:
            llm.send_session_op(self.key, calls.SuspendSession(self.key))


Turn = Union[SessionTurn, BranchTurn]


class AsyncSessions:
    """The sessions of one tenant."""

    def __init__(self, llm: AsyncLLM, tenant: str = "") -> None:
        self._llm = llm
        self.tenant = tenant

    def of(self, tenant: str) -> AsyncSessions:
        """The sessions of another tenant. Tenants do not see each other's sessions, and may use the same names."""
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
        """A new session, empty or starting with a prompt or messages. `ttl`: seconds without use after which it is
        deleted. `first_render`: renders the messages instead of the model's chat template. `is_new`: the name is known
        to be unused (generated), and is not looked up."""
        if tenant is not None and tenant != self.tenant:
            return await self.of(tenant).create(
                name, prompt, messages=messages, tools=tools, ttl=ttl, meta=meta,
                chat_template_kwargs=chat_template_kwargs, first_render=first_render, is_new=is_new,
            )  # fmt: skip
        if prompt is not None and messages is not None:
            raise ValidationError("a session starts with a prompt or with messages, not with both", "messages")
        session = self.handle(name, tools)
        added = Addition(0, [])
        if (begin := messages if prompt is None else prompt) is not None:
            added = await session.read(begin, [], 0, tools, chat_template_kwargs, first_render)
        salt = self._llm.inputs.salt_of(self.tenant)
        op = calls.CreateSession(
            session.key, added.tokens, salt, checked_ttl(ttl), checked_meta(meta or {}), is_new,
            stored_media(added.media),
        )  # fmt: skip
        session.found = _info(await self._llm.call_sessions(op))
        return session

    async def resume(self, name: str) -> AsyncSession:
        """An existing session; raises if there is none, or if it is lost. Its next turn loads the KV it needs."""
        session = self.handle(name)
        session.found = _info(await self._llm.call_sessions(calls.TouchSession(session.key)))
        return session

    async def get(self, name: str) -> AsyncSession:
        """An existing session, lost or not. Does not count as use."""
        session = self.handle(name)
        session.found = await session.info()
        return session

    async def page(self, after: str | None = None, limit: int = PAGE) -> SessionPage:
        """Up to `limit` sessions, oldest first; `after`: those created after the one with that name."""
        key = None if after is None else session_key(self.tenant, after)
        answer = await self._llm.call_sessions(calls.ListSessions(owner_id(self.tenant), key, limit))
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
        """The number of sessions."""
        return (await self.use()).sessions

    async def use(self) -> SessionUse:
        """How many sessions, tokens and bytes they use, of what max_tenant_sessions and its relatives allow."""
        answer = await self._llm.call_sessions(calls.GetSessionUse(owner_id(self.tenant)))
        assert answer.use is not None
        return answer.use

    async def exists(self, name: str) -> bool:
        """Whether there is a session with that name."""
        try:
            await self.get(name)
        except (SessionNotFoundError, ValidationError):
            return False
        return True

    async def delete(self, name: str) -> None:
        """Delete a session. Its forks stay."""
        await self._llm.call_sessions(calls.DeleteSession(session_key(self.tenant, name)))

    async def import_(
        self, source: str | os.PathLike[str] | bytes, name: str | None = None, *, ttl: float | None = None
    ) -> AsyncSession:
        """A session from a file that `export` wrote, or from its bytes, under its own name or another."""
        data = source if isinstance(source, bytes) else await asyncio.to_thread(read_file, source)
        salt = self._llm.inputs.salt_of(self.tenant)
        answer = await self._llm.call_sessions(calls.ImportSession(data, self.tenant, name, salt, checked_ttl(ttl)))
        session = self.handle(_info(answer).name)
        session.found = _info(answer)
        return session

    def handle(self, name: str, tools: Sequence[Any] | None = None) -> AsyncSession:
        """A session by its name, without checking that it exists."""
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
        """Its key in the engine."""
        self.found: SessionInfo | None = None
        """Its state when it was created or looked up."""

    async def append(
        self,
        given: SessionInput,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        first_render: RenderText | None = None,
    ) -> SessionInfo:
        """Append text, token ids or messages. They are durable when this returns, and computed with the next turn."""
        tools = self._tools if tools is None and is_messages(given) else tools
        answer = await self._llm.call_sessions(calls.ReadTokens(self.key, -TAIL_TOKENS))
        length = _info(answer).num_tokens
        addition = await self.read(given, answer.tokens or [], length, tools, chat_template_kwargs, first_render)
        self._tools = tools if tools is not None else self._tools
        media = stored_media(addition.media)
        op = calls.AppendTokens(self.key, addition.tokens, addition.drop, length, media)
        return _info(await self._llm.call_sessions(op))

    async def read(
        self,
        given: SessionInput,
        tail: Sequence[int],
        length: int,
        tools: Sequence[Any] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        first_render: RenderText | None,
    ) -> Addition:
        """The tokens to add to a session of `length` tokens that ends with `tail`."""
        inputs = self._llm.inputs
        reader = SessionReader(inputs, None if inputs.tokenizer is None else self._llm.renderer.render_text)

        def read() -> Addition:
            addition = reader.read(
                given, tail, tools=tools, chat_template_kwargs=chat_template_kwargs, first_render=first_render
            )
            reader.check_room(length, addition)
            return addition

        is_short = not is_messages(given) and len(given) < LONG_TEXT if hasattr(given, "__len__") else True
        if is_short:
            return read()
        pool = self._llm.media_work if is_messages(given) and has_media(given) else self._llm.work
        addition = await pool.run(read, tenant=self._sessions.tenant)
        if addition.media is not None:
            self._llm.session_items.add(self.key, addition.media.items)
        return addition

    async def generate(
        self,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRAChoice = None,
    ) -> RequestOutput:
        """One turn: generate a continuation and append it. If it calls one of `tools`, the session is suspended.
        `lora_request`: the adapters of this turn."""
        params = (self._llm.get_default_sampling_params() if params is None else params).clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        outputs = self.stream(params, tools=tools, request_id=request_id, priority=priority, lora_request=lora_request)
        async with aclosing(outputs):
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
        lora_request: LoRAChoice = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, streamed. Leaving early aborts the turn, and the session is as it was before."""
        self._tools = tools if tools is not None else self._tools
        tokens = await self.tokens()
        self._llm.inputs.check_room(len(tokens), "session")
        prompt = self._llm.inputs.session_prompt(tokens, self._llm.session_items.of(self.key))
        adapters = await self._llm.adapters_of(lora_request)
        turn = SessionTurn(self.key)
        run = self._llm.run(prompt, params, request_id, priority, self._sessions.tenant, turn, adapters=adapters)
        async with aclosing(run) as outputs:
            async for output in outputs:
                if output.finished and self._tools:
                    await self._suspend_after_calls(len(output.prompt_token_ids))
                yield output

    async def _suspend_after_calls(self, start: int) -> None:
        answer = await self._llm.call_sessions(calls.ReadTokens(self.key, start))
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
        """A turn that starts by appending: its prompt, and the turn, which appends once the request is checked. If it
        does not finish, the session is as it was before."""
        answer = await self._llm.call_sessions(calls.ReadTokens(self.key))
        tokens, length = answer.tokens or [], _info(answer).num_tokens
        if given is None:
            self._llm.inputs.check_room(length, "session")
            return tokens, SessionTurn(self.key, items=tuple(self._llm.session_items.of(self.key)))
        addition = await self.read(given, tokens[-TAIL_TOKENS:], length, tools, chat_template_kwargs, first_render)
        kept = tokens[: length - addition.drop]
        prompt = kept + addition.tokens
        items = tuple(self._llm.session_items.of(self.key))
        if not addition.tokens:
            return prompt, SessionTurn(self.key, items=items)
        added = calls.AppendTokens(self.key, addition.tokens, addition.drop, length, stored_media(addition.media))
        undo = calls.AppendTokens(self.key, tokens[len(kept) :], len(addition.tokens), len(prompt))
        return prompt, SessionTurn(self.key, append=added, take_back=undo, items=items)

    async def suspend(self, wait: bool = True) -> SessionInfo:
        """Free its device blocks. With `wait`, returns when its KV is saved."""
        return _info(await self._llm.call_sessions(calls.SuspendSession(self.key, wait)))

    async def fork(self, name: str, at: int | None = None) -> AsyncSession:
        """A new session with the first `at` tokens of this one (default: all). They share cached blocks."""
        made = self._sessions.handle(name, self._tools)
        if at is not None:
            check_integer("at", at, 0)
        made.found = _info(await self._llm.call_sessions(calls.ForkSession(self.key, made.key, at)))
        return made

    async def export(self, path: str | os.PathLike[str]) -> None:
        """Write the session to a file: its tokens and metadata, not its KV."""
        await asyncio.to_thread(write_export, await self.exported(), path)

    async def exported(self) -> bytes:
        """What `export` writes."""
        answer = await self._llm.call_sessions(calls.ExportSession(self.key))
        return answer.data or b""

    async def update(self, *, ttl: float | None = KEEP, meta: Mapping[str, str] | None = None) -> SessionInfo:
        """Change the time to live (None: no limit), or the metadata."""
        keeps = ttl is KEEP
        new_meta = None if meta is None else checked_meta(meta)
        op = calls.UpdateSession(self.key, None if keeps else checked_ttl(ttl), keeps, new_meta)
        return _info(await self._llm.call_sessions(op))

    async def recover(self) -> SessionInfo:
        """Keep what is left of a lost session."""
        return _info(await self._llm.call_sessions(calls.RecoverSession(self.key)))

    async def delete(self) -> None:
        """Delete the session. Its forks stay."""
        await self._sessions.delete(self.name)

    async def tokens(self) -> list[int]:
        """All its tokens."""
        return (await self._llm.call_sessions(calls.ReadTokens(self.key))).tokens or []

    async def text(self) -> str:
        """All its tokens as text, including special tokens."""
        tokenizer = await self._llm.get_tokenizer()
        text: str = tokenizer.decode(await self.tokens(), skip_special_tokens=False)
        return text

    async def info(self) -> SessionInfo:
        """Its state."""
        return _info(await self._llm.call_sessions(calls.GetSession(self.key)))

    def __repr__(self) -> str:
        return f"AsyncSession({self.name!r})"


def _info(answer: calls.SessionAnswer) -> SessionInfo:
    assert answer.info is not None
    return answer.info
