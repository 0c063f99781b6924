"""Requests that are turns of sessions."""

from __future__ import annotations

from dataclasses import dataclass

from quire.api.async_sessions import SessionTurn as SessionTurn
from quire.engine.session_calls import SuspendSession
from quire.messages.beams import BeamSearchParams
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.http import Exchange
from quire.server.protocol.sampling import GenerationFields, session_names
from quire.sessions.log import session_key

SESSION_HEADER = "x-session-id"


@dataclass
class SessionPrompt:
    """What a session's turn begins with."""

    text: str
    tokens: list[int]
    turn: SessionTurn


def session_turn(
    exchange: Exchange, request: GenerationFields, search: BeamSearchParams | None = None
) -> SessionTurn | None:
    """The session that a whole conversation is to be, by the body's `session_id` or the header; None for none."""
    name = exchange.headers.get(SESSION_HEADER) if request.session_id is None else request.session_id
    if name is None:
        return None
    if request.session_id is None:
        exchange.sent_as = {**exchange.sent_as, **session_names("X-Session-Id")}
    if (request.n or 1) != 1 or search is not None:
        raise bad_request("a turn of a session has one sample: n must be 1, and no beam search", "n")
    return SessionTurn(session_key(exchange.tenant, name), rewrites=True)


async def fall_asleep(server: ServerContext, turn: SessionTurn) -> None:
    """The answer calls tools: until their results come, the session's memory is better used by others."""
    await server.llm.call_sessions(SuspendSession(turn.key))
