"""What the front's process may ask of the engine's sessions, and how the loop answers.

Nothing here waits: an operation changes what is in memory and writes without a sync, and its answer goes out when the
disk has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Union

import msgspec

from quire.errors import SessionBusyError
from quire.sessions.keeper import KEEP, SessionInfo, SessionKeeper, SessionPage
from quire.sessions.log import name_of, session_key

# Sessions go by what `session_key` makes of tenant and name.


class CreateSession(msgspec.Struct, tag=True):
    key: str
    tokens: list[int]
    salt: str = ""
    ttl: float | None = None
    meta: dict[str, str] = {}
    is_new: bool = False
    """Its name was made up for it: nobody else can have it."""


class AppendTokens(msgspec.Struct, tag=True):
    """Add tokens in place of the last `drop`."""

    key: str
    tokens: list[int]
    drop: int = 0
    length: int | None = None
    """How many tokens the session is thought to have; it is refused if it has not."""


class RewriteSession(msgspec.Struct, tag=True):
    """The session holds these tokens from now on; it may be new."""

    key: str
    tokens: list[int]
    salt: str = ""


class CutSession(msgspec.Struct, tag=True):
    """The session keeps its first `at` tokens, if it has more."""

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
    """The session's tokens from `start` on; below 0, so many of the last."""

    key: str
    start: int = 0


class ListSessions(msgspec.Struct, tag=True):
    owner: str
    after: str | None
    """The key of the last session of the page before."""
    limit: int
    made_after: float | None = None
    """Instead of a key: those made later than that, in seconds since the epoch."""


class CountSessions(msgspec.Struct, tag=True):
    owner: str


class SuspendSession(msgspec.Struct, tag=True):
    key: str
    wait: bool = False
    """Answer when all that is to be saved is saved."""


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
    ListSessions, CountSessions, SuspendSession, UpdateSession, RecoverSession, DeleteSession, ExportSession,
    ImportSession,
]  # fmt: skip


class SessionAnswer(msgspec.Struct, omit_defaults=True):
    """What came of it: the field that the question calls for."""

    info: SessionInfo | None = None
    page: SessionPage | None = None
    tokens: list[int] | None = None
    data: bytes | None = None
    count: int | None = None


Reply = Callable[[Union[SessionAnswer, Exception]], object]


class SessionDesk:
    """Answers questions about sessions in the engine's loop."""

    def __init__(self, keeper: Callable[[], SessionKeeper]) -> None:
        """`keeper` makes them, when the first question comes."""
        self._keeper = keeper
        self._settling: list[tuple[str, SessionAnswer, Reply]] = []

    def take(self, op: SessionOp, reply: Reply) -> None:
        """Do what is asked. `reply` is told what came of it, now or later."""
        try:
            keeper = self._keeper()
            answer = apply(keeper, op)
        except Exception as error:  # whatever is wrong with one question, others are answered
            reply(error)
            return
        if isinstance(op, SuspendSession) and op.wait and not keeper.kv.is_settled(op.key):
            self._settling.append((op.key, answer, reply))
        else:
            keeper.commit(lambda: reply(answer), reply)

    def settle(self) -> None:
        """After a step: tell those whose session is saved by now."""
        if self._settling:
            keeper = self._keeper()
            waiting, self._settling = self._settling, []
            for key, answer, reply in waiting:
                if keeper.kv.is_settled(key):
                    keeper.commit(lambda answer=answer, reply=reply: reply(answer), reply)  # type: ignore[misc]
                else:
                    self._settling.append((key, answer, reply))


def apply(keeper: SessionKeeper, op: SessionOp) -> SessionAnswer:
    """Do it, without waiting for the disk."""
    match op:
        case CreateSession():
            return _of(keeper.create(op.key, op.tokens, salt=op.salt, ttl=op.ttl, meta=op.meta, durable=False))
        case AppendTokens():
            length = keeper.get(op.key).num_tokens
            if op.length is not None and op.length != length:
                raise SessionBusyError(
                    f"session {name_of(op.key)!r} has changed while something was added to it: try again"
                )
            at = length - op.drop if op.drop else None
            return _of(keeper.append(op.key, op.tokens, at=at, durable=False))
        case RewriteSession():
            return _of(keeper.rewrite(op.key, op.tokens, salt=op.salt, durable=False))
        case CutSession():
            return _of(keeper.cut(op.key, op.at, durable=False))
        case ForkSession():
            return _of(keeper.fork(op.key, op.new_key, op.at, durable=False))
        case GetSession():
            return _of(keeper.get(op.key))
        case TouchSession():
            return _of(keeper.touch(op.key))
        case ReadTokens():
            return SessionAnswer(info=keeper.get(op.key), tokens=keeper.tokens(op.key, op.start))
        case ListSessions():
            after = 0 if op.after is None else keeper.store.get(op.after).id
            if op.made_after is not None:
                after = keeper.store.last_made(op.made_after, op.owner)
            return SessionAnswer(page=keeper.page(after, op.limit, op.owner))
        case CountSessions():
            return SessionAnswer(count=keeper.count(op.owner))
        case SuspendSession():
            return _of(keeper.suspend(op.key))
        case UpdateSession():
            ttl = KEEP if op.keeps_ttl else op.ttl
            return _of(keeper.update(op.key, ttl=ttl, meta=op.meta, durable=False))
        case RecoverSession():
            return _of(keeper.recover(op.key, durable=False))
        case DeleteSession():
            keeper.delete(op.key, durable=False)
            return SessionAnswer()
        case ExportSession():
            return SessionAnswer(info=keeper.get(op.key), data=keeper.export(op.key))
        case ImportSession():
            return _of(
                keeper.import_(
                    op.data,
                    lambda own: session_key(op.tenant, own if op.name is None else op.name),
                    salt=op.salt,
                    ttl=op.ttl,
                    durable=False,
                )
            )


def _of(info: SessionInfo) -> SessionAnswer:
    return SessionAnswer(info=info)
