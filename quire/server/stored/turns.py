"""A stored response as a turn of a session.

The session has the turn's tokens, and KV wherever there is room for it; the store has its items. A follow-up's prompt
is rendered from all items of its context. If its text begins with the text of the previous turn's tokens, it uses these
tokens, and its session is a fork of that turn's: so their KV is found, also after a restart with `kv_disk`. Where the
template renders earlier messages differently, or where the model, the template, the instructions or the tools have
changed, the text differs and is tokenized anew. Nothing depends on a session: without one, KV is computed again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from quire.api.async_sessions import BranchTurn
from quire.engine.session_calls import ReadTokens
from quire.errors import QuireError, StoreError
from quire.loading.model_config import tokens_fingerprint
from quire.server.chat_generation import AnswerPiece, Branch, ChatGeneration, prepare
from quire.server.dialects.response_items import references, resolved, stored_items
from quire.server.dialects.responses_chat import as_chat
from quire.server.dialects.responses_tools import OfferedTools
from quire.server.dialects.responses_writer import ResponseWriter, new_response
from quire.server.errors import ApiError, bad_request
from quire.server.generation import SESSION_HEADER
from quire.server.http import Exchange
from quire.server.lifecycle.answer_watch import answer_or_reason
from quire.server.logprobs import chat_logprobs, takes_long
from quire.server.protocol.chat import TokenLogprob
from quire.server.protocol.response_events import ResponseEvent
from quire.server.protocol.responses import ResponsesRequest
from quire.server.stored.store import StoredContext, StoredTurn, as_stored_error
from quire.server.stored.tree import Item
from quire.sessions.log import owner_id, session_key

if TYPE_CHECKING:
    from quire.server.context import ServerContext

logger = logging.getLogger(__name__)

_SESSIONS_OF = "\0responses\0"
"""Before a tenant's name: the tenant that sessions of its stored responses belong to. No client can have this name, so
they are neither listed with the tenant's own sessions nor in the way of their names."""


@dataclass
class ResponseTurn:
    """A request between its arrival and its end."""

    owner: str
    response_id: str
    is_stored: bool
    """The response can be retrieved later."""
    context: StoredContext = field(default_factory=StoredContext)
    branch: Branch | None = None
    salt: str = ""
    inputs: list[Item] = field(default_factory=list)
    has_references: bool = False
    """Its input referred to stored items, which can be large."""
    locked: set[tuple[str, str]] = field(default_factory=set)
    """Conversations with a response under way; its own is among them until `unlock`."""

    @property
    def is_kept(self) -> bool:
        """Whether anything of it is stored."""
        return self.is_stored or self.context.conversation is not None

    def unlock(self) -> None:
        """The conversation may have its next response."""
        if self.context.conversation is not None:
            self.locked.discard((self.owner, self.context.conversation))

    def record(self, response: Any, session: str = "") -> StoredTurn:
        """What the store keeps of it."""
        outputs = msgspec.to_builtins(response.output)
        body = msgspec.json.encode(msgspec.structs.replace(response, output=[]))
        name = self.response_id if self.is_stored else None
        return StoredTurn(self.owner, self.context, self.inputs, outputs, name, body, session, self.salt)


async def begin(context: ServerContext, exchange: Exchange, request: ResponsesRequest) -> ResponseTurn:
    """Find what a request refers to; raises 404 for what is not stored. Call `unlock` at its end."""
    request.check_references()
    stored, owner = context.stored, owner_id(exchange.tenant)
    is_stored = stored.is_on if request.store is None else request.store
    if not stored.is_on and (is_stored or request.background):
        field_name = "store" if is_stored else "background"
        raise bad_request(f"{field_name} must be false: nothing is stored here (--max-stored-responses 0)", field_name)
    turn = ResponseTurn(
        owner, f"resp_{uuid.uuid4().hex if is_stored else exchange.id}", is_stored, locked=stored.locked
    )
    if request.previous_response_id is not None:
        turn.context = await stored.call(stored.store.response_context, owner, request.previous_response_id)
    elif (name := request.conversation_id) is not None:
        turn.context = await _locked_context(context, owner, name)
    model = turn.context.model
    if request.model is None and context.llm.config.enable_lora and model not in context.names:
        request.model = model or None  # it goes on with its adapter
    try:
        if not isinstance(request.input, str) and (named := references(request.input)):
            request.input = resolved(request.input, await stored.call(stored.store.items, owner, named))
            turn.has_references = True
        await _find_branch(context, exchange, request, turn)
    except BaseException:
        turn.unlock()
        raise
    return turn


async def _locked_context(context: ServerContext, owner: str, name: str) -> StoredContext:
    stored = context.stored
    if (owner, name) in stored.locked:
        raise ApiError(
            409, "the conversation has a response under way: wait for its end, then try again", param="conversation",
            headers={"Retry-After": "1"},
        )  # fmt: skip
    stored.locked.add((owner, name))
    try:
        return await stored.call(stored.store.conversation_context, owner, name)
    except BaseException:
        stored.locked.discard((owner, name))
        raise


async def _find_branch(
    context: ServerContext, exchange: Exchange, request: ResponsesRequest, turn: ResponseTurn
) -> None:
    """The tokens of the turn that this one goes on from, and a session for its own."""
    previous = turn.context
    entry = context.adapters.get(request.model or "")
    adapter = "" if entry is None else f"{entry.digest.hex()[:16]}:"
    turn.salt = f"{tokens_fingerprint(context.llm.info.model).hex()[:16]}:{adapter}{request.cache_salt or ''}"
    source = previous.session if previous.salt == turn.salt else ""
    before = await _tokens_of(context, exchange, source) if source else []
    branch = None
    if turn.is_kept and SESSION_HEADER not in exchange.headers:
        key = session_key(f"{_SESSIONS_OF}{exchange.tenant}", turn.response_id)
        branch = BranchTurn(key, source, context.config.stored_response_ttl)
    turn.branch = Branch(branch, before) if branch is not None or before else None


async def _tokens_of(context: ServerContext, exchange: Exchange, session: str) -> list[int]:
    """A session's tokens; none if it has expired or is damaged, or if its engine does not answer."""
    context.check_serving()
    try:
        asked = context.llm.call_sessions(ReadTokens(session))
        answer, reason = await answer_or_reason(asked, *context.supervisor.each)
    except QuireError as error:
        answer, reason = None, str(error)
    if answer is None:
        logger.info("request %s goes on from stored items, not from their tokens: %s", exchange.id, reason)
        return []
    return answer.tokens or []


def prepare_response(
    context: ServerContext, exchange: Exchange, request: ResponsesRequest, turn: ResponseTurn
) -> tuple[ChatGeneration, OfferedTools]:
    """The request's generation, and the tools it offers, in `Exchange.work`."""
    tools = OfferedTools(request.tools, exchange.fields)
    chat = as_chat(request, context.max_model_len, exchange.fields, tools, turn.context.items)
    generation = prepare(context, exchange, chat, branch=turn.branch)
    if turn.is_kept:
        turn.inputs = stored_items(request.input, exchange.fields)
    return generation, tools


class ResponseAnswer:
    """A response while it is generated."""

    def __init__(
        self,
        context: ServerContext,
        request: ResponsesRequest,
        generation: ChatGeneration,
        tools: OfferedTools,
        turn: ResponseTurn,
    ) -> None:
        model = request.model or context.names[0]
        response = new_response(request, turn.response_id, int(time.time()), model, store=turn.is_stored)
        self.writer = ResponseWriter(response, tools)
        self.turn = turn
        self._context = context
        self._request = request
        self._generation = generation
        self.is_long = False
        """Whether the last events have so many logprobs, or so much text, that they take long to write."""

    async def events(self) -> AsyncGenerator[list[ResponseEvent], None]:
        """Events as the response is generated. When the last ones come, the response is stored."""
        writer, reason, is_first, is_over = self.writer, None, True, False
        try:
            async with aclosing(self._generation.pieces()) as pieces:
                async for piece in pieces:
                    events = writer.start() if is_first else []
                    is_first = False
                    self.is_long = takes_long(len(piece.sequence.token_ids), self._logprobs_each)
                    logprobs = (
                        await self._context.limits.work.run(self._logprobs, piece, tenant=self.turn.owner)
                        if self.is_long
                        else self._logprobs(piece)
                    )
                    events += writer.write(piece.deltas, logprobs)
                    reason = piece.finish_reason
                    if events:
                        yield events
            is_over = True
        finally:
            if not is_over:
                self._drop_session()  # the client may have left after the last token
        self.is_long = takes_long(self._generation.counter.completion, self._logprobs_each)
        last = writer.finish(reason, self._generation.counter.usage)
        if self.turn.is_kept:
            await asyncio.shield(keeping := asyncio.ensure_future(self._keep()))
            if not keeping.result():
                writer.response.store = last[-1].response.store = False  # type: ignore[attr-defined]
        yield last

    async def _keep(self) -> bool:
        """Store the response, and save its KV. False: it is not stored, and the client did not ask for it."""
        turn, context, branch = self.turn, self._context, self._branch
        store, session = context.stored.store, branch.key if branch is not None and branch.has_session else ""
        add = store.finish if self._request.background else store.add
        try:
            await store.run(lambda: add(turn.record(self.writer.response, session)))
        except StoreError as error:
            self._drop_session()
            if self._request.store or self._request.background or turn.context.conversation is not None:
                raise as_stored_error(error) from None
            return False
        if branch is not None:
            await branch.suspend(context.llm)
        return turn.is_stored

    @property
    def _branch(self) -> BranchTurn | None:
        return None if self.turn.branch is None else self.turn.branch.turn

    def _drop_session(self) -> None:
        if self._branch is not None:
            self._branch.undo(self._context.llm)

    @property
    def _logprobs_each(self) -> int | None:
        return (self._request.top_logprobs or 0) if self._request.wants_logprobs else None

    def _logprobs(self, piece: AnswerPiece) -> list[TokenLogprob]:
        sequence, request = piece.sequence, self._request
        if not request.wants_logprobs or not sequence.token_ids:
            return []
        logprobs = chat_logprobs(sequence.token_ids, sequence.logprobs, request.top_logprobs or 0, False)
        return [] if logprobs is None else logprobs.content
