"""Session operations that the front process sends to the engine, and how the engine's loop answers them.

Nothing here waits: an operation changes memory and writes without a sync; its answer is sent when it is durable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Union

import msgspec

from quire.errors import SessionBusyError
from quire.messages.media import PromptMedia
from quire.sessions.keeper import KEEP, SessionInfo, SessionKeeper, SessionPage
from quire.sessions.log import name_of, session_key
from quire.sessions.log.state import SessionUse

# `key`: the session's key in the store, see `session_key`.


class CreateSession(msgspec.Struct, tag=True):
    key: str
    tokens: list[int]
    salt: str = ""
    ttl: float | None = None
    meta: dict[str, str] = {}
    is_new: bool = False
    """Its name was generated: no other session can have it."""
    media: PromptMedia | None = None
    """What the tokens have in place of ids; arrays of items are of no use here."""


class AppendTokens(msgspec.Struct, tag=True):
    """Append tokens after removing the last `drop`."""

    key: str
    tokens: list[int]
    drop: int = 0
    length: int | None = None
    """How many tokens the caller expects the session to have; it is refused if it has another number."""
    media: PromptMedia | None = None
    """What the appended tokens have in place of ids, counted from the first of them."""


class RewriteSession(msgspec.Struct, tag=True):
    """Replace the session's tokens; creates it if needed."""

    key: str
    tokens: list[int]
    salt: str = ""
    media: PromptMedia | None = None


class CutSession(msgspec.Struct, tag=True):
    """Truncate the session to its first `at` tokens."""

    key: str
    at: int


class ForkSession(msgspec.Struct, tag=True):
    key: str
    new_key: str
    at: int | None = None


class GetSession(msgspec.Struct, tag=True):
    key: str


class TouchSession(msgspec.Struct, tag=True):
    key: str


class ReadTokens(msgspec.Struct, tag=True):
    """The session's tokens from `start` on; a negative `start` counts from the end."""

    key: str
    start: int = 0


class ListSessions(msgspec.Struct, tag=True):
    owner: str
    after: str | None
    """The key of the last session of the previous page."""
    limit: int
    made_after: float | None = None
    """Instead of a key: sessions created later than this, in seconds since the epoch."""


class GetSessionUse(msgspec.Struct, tag=True):
    owner: str


class SuspendSession(msgspec.Struct, tag=True):
    key: str
    wait: bool = False
    """Answer when its KV is saved."""


class UpdateSession(msgspec.Struct, tag=True):
    key: str
    ttl: float | None = None
    keeps_ttl: bool = True
    meta: dict[str, str] | None = None


class RecoverSession(msgspec.Struct, tag=True):
    key: str


class DeleteSession(msgspec.Struct, tag=True):
    key: str


class ExportSession(msgspec.Struct, tag=True):
    key: str


class ImportSession(msgspec.Struct, tag=True):
    data: bytes
    tenant: str = ""
    name: str | None = None
    salt: str = ""
    ttl: float | None = None


SessionOp = Union[
    CreateSession, AppendTokens, RewriteSession, CutSession, ForkSession, GetSession, TouchSession, ReadTokens,
    ListSessions, GetSessionUse, SuspendSession, UpdateSession, RecoverSession, DeleteSession, ExportSession,
    ImportSession,
]  # fmt: skip


REPEATABLE = (
    RewriteSession, CutSession, GetSession, TouchSession, ReadTokens, ListSessions, SuspendSession,
    UpdateSession, RecoverSession, ExportSession,
)  # fmt: skip
"""Operations that have the same result when they are done twice."""


class SessionAnswer(msgspec.Struct, omit_defaults=True):
    """The result of an operation: the field that it calls for."""

    info: SessionInfo | None = None
    page: SessionPage | None = None
    tokens: list[int] | None = None
    data: bytes | None = None
    use: SessionUse | None = None


Reply = Callable[[Union[SessionAnswer, Exception]], object]


class SessionHandler:
    """Runs session operations in the engine's loop."""

    def __init__(self, keeper: Callable[[], SessionKeeper]) -> None:
        """`keeper` creates the keeper with the first operation."""
        self._keeper = keeper
        self._saving: list[tuple[str, SessionAnswer, Reply]] = []
        """Answers that wait until a session is saved."""

    def handle(self, op: SessionOp, reply: Reply) -> None:
        """Run an operation. `reply` is called with the answer or the error, now or later."""
        try:
            keeper = self._keeper()
            answer = apply(keeper, op)
        except Exception as error:  # an error of one operation must not stop the loop
            reply(error)
            return
        if isinstance(op, SuspendSession) and op.wait and not keeper.kv.is_saved(op.key):
            self._saving.append((op.key, answer, reply))
        else:
            keeper.commit(lambda: reply(answer), reply)

    def answer_saved(self) -> None:
        """After a step: answer for the sessions that are saved by now."""
        if self._saving:
            keeper = self._keeper()
            waiting, self._saving = self._saving, []
            for key, answer, reply in waiting:
                if keeper.kv.is_saved(key):
                    keeper.commit(lambda answer=answer, reply=reply: reply(answer), reply)  # type: ignore[misc]
                else:
                    self._saving.append((key, answer, reply))


def apply(keeper: SessionKeeper, op: SessionOp) -> SessionAnswer:
    """Run an operation, without waiting for the disk."""
    match op:
        case CreateSession():
            return SessionAnswer(
                keeper.create(op.key, op.tokens, salt=op.salt, ttl=op.ttl, meta=op.meta, media=op.media, durable=False)
            )
        case AppendTokens():
            length = keeper.get(op.key).num_tokens
            if op.length is not None and op.length != length:
                raise SessionBusyError(
                    f"session {name_of(op.key)!r} has {length} tokens, not {op.length}: it has changed, try again"
                )
            at = length - op.drop if op.drop else None
            return SessionAnswer(keeper.append(op.key, op.tokens, at=at, media=op.media, durable=False))
        case RewriteSession():
            return SessionAnswer(keeper.rewrite(op.key, op.tokens, salt=op.salt, media=op.media, durable=False))
        case CutSession():
            return SessionAnswer(keeper.cut(op.key, op.at, durable=False))
        case ForkSession():
            return SessionAnswer(keeper.fork(op.key, op.new_key, op.at, durable=False))
        case GetSession():
            return SessionAnswer(keeper.get(op.key))
        case TouchSession():
            return SessionAnswer(keeper.touch(op.key))
        case ReadTokens():
            return SessionAnswer(info=keeper.get(op.key), tokens=keeper.tokens(op.key, op.start))
        case ListSessions():
            after = 0 if op.after is None else keeper.store.get(op.after).id
            if op.made_after is not None:
                after = keeper.store.last_id_at(op.made_after, op.owner)
            return SessionAnswer(page=keeper.page(after, op.limit, op.owner))
        case GetSessionUse():
            return SessionAnswer(use=keeper.use(op.owner))
        case SuspendSession():
            return SessionAnswer(keeper.suspend(op.key))
        case UpdateSession():
            ttl = KEEP if op.keeps_ttl else op.ttl
            return SessionAnswer(keeper.update(op.key, ttl=ttl, meta=op.meta, durable=False))
        case RecoverSession():
            return SessionAnswer(keeper.recover(op.key, durable=False))
        case DeleteSession():
            keeper.delete(op.key, durable=False)
            return SessionAnswer()
        case ExportSession():
            return SessionAnswer(info=keeper.get(op.key), data=keeper.export(op.key))
        case ImportSession():
            return SessionAnswer(
                keeper.import_(
                    op.data,
                    lambda own: session_key(op.tenant, own if op.name is None else op.name),
                    salt=op.salt,
                    ttl=op.ttl,
                    durable=False,
                )
            )
