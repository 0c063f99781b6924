"""/v1/sessions: named conversations whose KV is kept between turns."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec import UNSET

from quire.api.async_sessions import AsyncSession, AsyncSessions
from quire.api.session_input import RenderText, is_messages
from quire.errors import ValidationError
from quire.server.chat_generation import SessionPrompt, is_long, preamble_of, rendered_tools, template_kwargs
from quire.server.chat_generation import prepare as prepare_chat
from quire.server.context import ServerContext
from quire.server.errors import ApiError, bad_request
from quire.server.http import Exchange
from quire.server.lifecycle.answer_watch import answering
from quire.server.protocol.chat import ChatChunk, ChatRequest, ChatResponse
from quire.server.protocol.completions import CompletionResponse
from quire.server.protocol.conversation import ChatMessage
from quire.server.protocol.sampling import session_names
from quire.server.protocol.sessions import (
    LARGEST_PAGE,
    AppendFields,
    SessionAppendRequest,
    SessionCreateRequest,
    SessionDeleted,
    SessionForkRequest,
    SessionGenerateRequest,
    SessionList,
    SessionObject,
    SessionUpdateRequest,
    SessionUsage,
    plain_input,
)
from quire.server.protocol.values import SESSION_NAME
from quire.server.routes.chat import ChatAnswer
from quire.server.routes.completions import CompletionAnswer
from quire.server.routes.completions import prepare as prepare_completion
from quire.server.routing import Route
from quire.sessions.keeper import KEEP, SessionInfo
from quire.vision.processor import Prepared

DEFAULT_PAGE = 100
ADAPTER = "adapter"
"""Key of the metadata of a session that was made for an adapter: its name, for turns that name no model."""
FILE = "application/octet-stream"
PIECE_BYTES = 1 << 18
LONG_SESSION = 4096
"""Tokens: the text of a session this long is made in a thread."""


@asynccontextmanager
async def open_sessions(context: ServerContext, exchange: Exchange) -> AsyncIterator[AsyncSessions]:
    """The tenant's sessions; raises 503 without an engine, and is cancelled if the client disconnects or the engine is
    stopped."""
    context.check_serving()
    async with exchange.interruptible(context.deadline(None)), answering(exchange, context.supervisor.each):
        yield context.llm.sessions.of(exchange.tenant)


def _path_session(sessions: AsyncSessions, exchange: Exchange) -> AsyncSession:
    try:
        return sessions.handle(exchange.path_params["session"])
    except ValidationError as error:
        raise bad_request(str(error), "session") from None


# Sessions


async def create(context: ServerContext, exchange: Exchange) -> None:
    """Create a session, empty or with text, token ids or messages."""
    request = await exchange.read_json(SessionCreateRequest)
    context.check_model(exchange, request.model)
    wanted = request.requested_name
    name = f"session-{secrets.token_hex(8)}" if wanted is None else wanted
    async with open_sessions(context, exchange) as sessions:
        meta = request.metadata
        if exchange.adapters:
            meta = {**(meta or {}), ADAPTER: exchange.adapters[0].name}
        arguments: dict[str, Any] = {"ttl": request.ttl, "meta": meta, "is_new": wanted is None}
        given, rendering = await exchange.work(_read_input, context, request, is_long=request.tools is not None)
        arguments |= {"messages": given, **rendering} if is_messages(given) else {"prompt": given}
        session = await sessions.create(name, **arguments)
        await exchange.reply(_as_object(session.found))


async def list_sessions(context: ServerContext, exchange: Exchange) -> None:
    """List sessions by page, in the order they were created."""
    query = exchange.query
    given = query.get("limit", str(DEFAULT_PAGE))
    if not given.isdecimal() or not 1 <= int(given[:9]) <= LARGEST_PAGE:
        raise bad_request(f"limit must be 1 to {LARGEST_PAGE}, got {given[:40]!r}", "limit")
    async with open_sessions(context, exchange) as sessions:
        page = await sessions.page(query.get("after"), int(given))
    data = [_as_object(info) for info in page.sessions]
    ends = (data[0].id, data[-1].id) if data else (None, None)
    use = SessionUsage(sessions=page.use.sessions, tokens=page.use.tokens, bytes=page.use.bytes)
    has_more = page.after is not None
    await exchange.reply(SessionList(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more, usage=use))


async def retrieve(context: ServerContext, exchange: Exchange) -> None:
    """Retrieve a session."""
    async with open_sessions(context, exchange) as sessions:
        await exchange.reply(_as_object(await _path_session(sessions, exchange).info()))


async def update(context: ServerContext, exchange: Exchange) -> None:
    """Change a session's time to live or metadata."""
    request = await exchange.read_json(SessionUpdateRequest)
    async with open_sessions(context, exchange) as sessions:
        ttl = KEEP if request.ttl is UNSET else request.ttl
        await exchange.reply(_as_object(await _path_session(sessions, exchange).update(ttl=ttl, meta=request.metadata)))


async def delete(context: ServerContext, exchange: Exchange) -> None:
    """Delete a session. Its forks stay."""
    async with open_sessions(context, exchange) as sessions:
        session = _path_session(sessions, exchange)
        await session.delete()
        await exchange.reply(SessionDeleted(id=session.name))


# Operations on one session


async def append(context: ServerContext, exchange: Exchange) -> None:
    """Append text, token ids or messages. They are durable on response, and computed with the next turn."""
    request = await exchange.read_json(SessionAppendRequest)
    async with open_sessions(context, exchange) as sessions:
        given, rendering = await exchange.work(_read_input, context, request, is_long=request.tools is not None)
        await exchange.reply(_as_object(await _path_session(sessions, exchange).append(given, **rendering)))


async def generate(context: ServerContext, exchange: Exchange) -> None:
    """Generate one turn, after appending the input if any; responds as chat completions or completions do."""
    request = await exchange.read_json(SessionGenerateRequest)
    async with exchange.interruptible(context.deadline(request.timeout)):
        context.check_serving()
        session = _path_session(context.llm.sessions.of(exchange.tenant), exchange)
        if request.session_id is not None and request.session_id != session.name:
            raise bad_request("session_id differs from the session in the path", "session_id")
        request.session_id = session.name
        if request.model is None and not request.adapters and context.llm.config.enable_lora:
            request.model = (await session.info()).meta.get(ADAPTER)
        answer = (
            await _chat(context, exchange, request, session)
            if request.is_chat
            else await _completion(context, exchange, request, session)
        )
        await (answer.stream() if request.stream else answer.send())


async def _chat(
    context: ServerContext, exchange: Exchange, request: SessionGenerateRequest, session: AsyncSession
) -> ChatAnswer:
    def read() -> tuple[ChatRequest, Any, dict[str, Any]]:
        chat = request.as_chat()
        chat.check_fields()
        given = None if request.input is None else plain_input(request.input)
        return chat, given, _chat_render_arguments(context, chat) if is_messages(given) else {}

    chat, given, rendering = await exchange.work(read, is_long=request.tools is not None)
    prompt = await _prompt(context, exchange, session, given, rendering)
    generation = await exchange.work(prepare_chat, context, exchange, chat, prompt, is_long=is_long(chat))
    return ChatAnswer(context, exchange, chat, generation)


async def _completion(
    context: ServerContext, exchange: Exchange, request: SessionGenerateRequest, session: AsyncSession
) -> CompletionAnswer:
    completion = request.as_completion()
    given = None if request.input is None else await exchange.work(plain_input, request.input)
    prompt = await _prompt(context, exchange, session, given, {})
    completion.prompt = list(prompt.tokens)
    jobs = await exchange.work(prepare_completion, context, exchange, completion)
    jobs[0].turn, jobs[0].text, jobs[0].media = prompt.turn, prompt.text, prompt.media
    return CompletionAnswer(context, exchange, completion, jobs)


async def _prompt(
    context: ServerContext, exchange: Exchange, session: AsyncSession, given: Any, rendering: dict[str, Any]
) -> SessionPrompt:
    tokens, turn = await session.prepare(given, **rendering)
    if not tokens:
        raise bad_request("the session is empty: give an input", "input")
    text = ""
    if context.tokenizer is not None:
        text = await exchange.work(context.texts.decode, tokens, is_long=len(tokens) > LONG_SESSION)
    sees = context.llm.inputs.media.processor is not None
    return SessionPrompt(text, tokens, turn, Prepared(tokens, list(turn.items)) if sees else None)


async def suspend(context: ServerContext, exchange: Exchange) -> None:
    """Suspend a session from the device, now or when its turn ends. With wait=true, responds when its KV is saved."""
    wait = exchange.query.get("wait", "false")
    if wait not in ("true", "false"):
        raise bad_request(f"wait must be true or false, got {wait[:40]!r}", "wait")
    async with open_sessions(context, exchange) as sessions:
        await exchange.reply(_as_object(await _path_session(sessions, exchange).suspend(wait == "true")))


async def resume(context: ServerContext, exchange: Exchange) -> None:
    """Resume a session: restarts its time to live. Its next turn loads what it needs."""
    async with open_sessions(context, exchange) as sessions:
        session = await sessions.resume(exchange.path_params["session"])
        await exchange.reply(_as_object(session.found))


async def recover(context: ServerContext, exchange: Exchange) -> None:
    """Recover the remaining tokens of a lost session."""
    async with open_sessions(context, exchange) as sessions:
        await exchange.reply(_as_object(await _path_session(sessions, exchange).recover()))


async def fork(context: ServerContext, exchange: Exchange) -> None:
    """Fork a session: a new one with the same first tokens, which shares blocks."""
    request = await exchange.read_json(SessionForkRequest)
    async with open_sessions(context, exchange) as sessions:
        made = await _path_session(sessions, exchange).fork(request.id, request.at)
        await exchange.reply(_as_object(made.found))


# Export and import


async def export(context: ServerContext, exchange: Exchange) -> None:
    """Export a session as a file: its tokens and metadata."""
    async with open_sessions(context, exchange) as sessions:
        session = _path_session(sessions, exchange)
        data = await session.exported()
        name = f'attachment; filename="{session.name}.session"'.encode()
        headers = [
            (b"content-type", FILE.encode()),
            (b"content-disposition", name),
            (b"content-length", b"%d" % len(data)),
        ]
        await exchange.start(200, headers)
        for start in range(0, len(data), PIECE_BYTES):
            await exchange.send_body(data[start : start + PIECE_BYTES], more=start + PIECE_BYTES < len(data))


async def import_session(context: ServerContext, exchange: Exchange) -> None:
    """Import a session from an exported file, under its own name or another."""
    given = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != FILE:
        raise ApiError(415, f"the body must be {FILE}, and Content-Type is {given or 'missing'}")
    name = exchange.query.get("id")
    exchange.client_names = session_names("id")
    data = await exchange.read_body()
    async with open_sessions(context, exchange) as sessions:
        session = await sessions.import_(data, name)
        await exchange.reply(_as_object(session.found))


# Conversions


def _read_input(
    context: ServerContext, request: SessionCreateRequest | SessionAppendRequest
) -> tuple[Any, dict[str, Any]]:
    """The input as the session API takes it, None without one, and how to render it."""
    request.check_fields()
    given = None if request.input is None else plain_input(request.input)
    return given, _render_arguments(context, request) if is_messages(given) else {}


def _render_arguments(context: ServerContext, request: AppendFields) -> dict[str, Any]:
    """Arguments for rendering messages as the chat route does."""
    chat = ChatRequest(
        messages=[ChatMessage(role="user", content="-")],
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    return _chat_render_arguments(context, chat)


def _chat_render_arguments(context: ServerContext, chat: ChatRequest) -> dict[str, Any]:
    rendering: dict[str, Any] = {"tools": rendered_tools(context, chat)}
    rendering["chat_template_kwargs"] = template_kwargs(context, chat)
    preamble = preamble_of(context, chat)
    if preamble is not None and context.tool_prompts is not None:
        rendering["first_render"] = _with_preamble(context, preamble)
    return rendering


def _with_preamble(context: ServerContext, preamble: str) -> RenderText:
    assert context.tool_prompts is not None
    offering = context.tool_prompts

    def render(messages: Any, **arguments: Any) -> str:
        return offering.render(list(messages), preamble, **arguments)

    return render


def _as_object(info: SessionInfo | None) -> SessionObject:
    assert info is not None
    return SessionObject(
        id=info.name,
        status=info.phase,
        created_at=int(info.created),
        last_used_at=int(info.used),
        expires_at=None if info.expires is None else int(info.expires),
        num_tokens=info.num_tokens,
        device_tokens=info.device_tokens,
        saved_tokens=info.kv_tokens,
        parent=info.parent,
        forked_at=info.forked_at,
        metadata=info.meta,
        lost=info.lost,
    )


_ONE = "/v1/sessions/{session}"
_NAME = {"type": "string", "pattern": SESSION_NAME}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": LARGEST_PAGE, "default": DEFAULT_PAGE}


def _route(method: str, path: str, handler: Any, **more: Any) -> Route:
    more.setdefault("answer", SessionObject)
    return Route(method, path, handler, uses_sessions=True, errors=(408,), **more)


ROUTES = [
    _route("POST", "/v1/sessions", create, body=SessionCreateRequest),
    _route("GET", "/v1/sessions", list_sessions, answer=SessionList, query={"after": _NAME, "limit": _LIMIT}),
    _route("POST", "/v1/sessions/import", import_session, body_type=FILE, query={"id": _NAME}),
    _route("GET", _ONE, retrieve),
    _route("PATCH", _ONE, update, body=SessionUpdateRequest),
    _route("DELETE", _ONE, delete, answer=SessionDeleted),
    _route("POST", f"{_ONE}/append", append, body=SessionAppendRequest),
    _route(
        "POST",
        f"{_ONE}/generate",
        generate,
        body=SessionGenerateRequest,
        answer=(ChatResponse, CompletionResponse),
        event=(ChatChunk, CompletionResponse),
        last_data="[DONE]",
        generates=True,
    ),
    _route("POST", f"{_ONE}/suspend", suspend, query={"wait": {"type": "boolean", "default": False}}),
    _route("POST", f"{_ONE}/resume", resume),
    _route("POST", f"{_ONE}/recover", recover),
    _route("POST", f"{_ONE}/fork", fork, body=SessionForkRequest),
    _route("GET", f"{_ONE}/export", export, answer=None, media_type=FILE),
]
