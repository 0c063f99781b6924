"""Which of several replicas holds a session: each session stays at one of them until it is deleted."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from quire.engine import session_calls as calls
from quire.engine.session_calls import SessionAnswer, SessionOp
from quire.errors import EngineDeadError, QuireError, ReplicaDownError, SessionNotFoundError
from quire.sessions.keeper import SessionPage
from quire.sessions.log import name_of, session_key
from quire.sessions.log.export import check_length, decode_export
from quire.sessions.log.state import SessionUse, exists_error, unpack_tokens

if TYPE_CHECKING:
    from quire.api.engine_group import EngineGroup
    from quire.api.replica import Replica

MAX_KNOWN = 1_000_000
"""Sessions whose replica is remembered; for others the replicas are queried again."""


class SessionAffinity:
    """Runs session operations at the replica that holds the session.

    A session's replica is looked up once, by querying all of them, and then remembered. A name is used once:
    creations of sessions with the same name wait for each other.
    """

    def __init__(self, group: EngineGroup, survives: bool) -> None:
        """`survives`: whether sessions outlive their engine."""
        self._group = group
        self.survives = survives
        self._known: OrderedDict[str, int] = OrderedDict()
        """Number of the replica that holds a session, by the session's key."""
        self._creating: dict[str, tuple[asyncio.Lock, int]] = {}
        """A lock for each name in use by a creation, and how many creations hold or wait for it."""

    # What is known

    def known(self, key: str) -> Replica | None:
        """The session's replica, if it is known."""
        number = self._known.get(key)
        return None if number is None else self._group.replicas[number]

    def replica_of(self, key: str) -> Replica:
        """The replica for a turn of the session; for an unknown session any replica, which refuses it."""
        home = self.known(key)
        return self._any_replica() if home is None else self._check_alive(home, key)

    def place(self, key: str, replica: Replica) -> None:
        """The session is at this replica now."""
        if self._group.router is not None:
            self._remember(key, replica)

    def forget(self, replica: Replica) -> None:
        """The replica is dead, and with it its sessions, unless they survive."""
        if not self.survives:
            for key in [key for key, number in self._known.items() if number == replica.number]:
                del self._known[key]

    # Operations

    async def call_sessions(self, op: SessionOp) -> SessionAnswer:
        """Run a session operation. Its changes are durable when this returns."""
        match op:
            case calls.ListSessions():
                return await self._page(op)
            case calls.GetSessionUse():
                answers = await asyncio.gather(*(replica.call_sessions(op) for replica in self._all_replicas()))
                return SessionAnswer(use=_summed(answer.use for answer in answers if answer.use is not None))
            case calls.CreateSession(is_new=True):
                return await self._create_at(op.key, self._group.choose_for_session(op.tokens, op.salt), op)
            case calls.CreateSession() | calls.RewriteSession():
                return await self._create(op.key, op, op.tokens, op.salt)
            case calls.ImportSession():
                given = decode_export(op.data)
                check_length(given, self._group.info.max_model_len, "the file")  # before its keys are computed
                key = session_key(op.tenant, given.name if op.name is None else op.name)
                return await self._create(key, op, unpack_tokens(given.tokens).tolist(), op.salt)
            case calls.ForkSession():
                return await self._fork(op)
            case calls.DeleteSession():
                async with self._creation_lock(op.key):  # no creation of the same name in between
                    answer = await self._call_replica_of(op.key, op)
                    self._known.pop(op.key, None)
                    return answer
        return await self._call_replica_of(op.key, op)

    async def _call_replica_of(self, key: str, op: SessionOp) -> SessionAnswer:
        """Run it at the session's replica; if there is no such session, at any, which refuses it."""
        home = await self._find(key)
        return await (self._any_replica() if home is None else home).call_sessions(op)

    async def _create(self, key: str, op: SessionOp, tokens: list[int], salt: str) -> SessionAnswer:
        """Create or rewrite a session; the router chooses the replica of a new one."""
        async with self._creation_lock(key):
            home = await self._find(key) or self._group.choose_for_session(tokens, salt)
            return await self._create_at(key, home, op)

    async def _fork(self, op: calls.ForkSession) -> SessionAnswer:
        """A fork is made at its source's replica, and shares its blocks."""
        async with self._creation_lock(op.new_key):
            home, existing = await self._find(op.key), await self._find(op.new_key)
            if home is None:
                return await self._any_replica().call_sessions(op)  # which refuses it: no such session
            if existing is not None and existing is not home and await self._has_session(existing, op.new_key):
                raise exists_error(op.new_key)
            return await self._create_at(op.new_key, home, op)

    async def _create_at(self, key: str, home: Replica, op: SessionOp) -> SessionAnswer:
        """Create a session there. Its replica is remembered first, so that concurrent calls go to the same one."""
        was_known = key in self._known
        self._remember(key, home)
        try:
            return await home.call_sessions(op)
        except EngineDeadError:  # it may have been created
            raise
        except QuireError:
            if not was_known:
                self._known.pop(key, None)
            raise

    # Lookup

    async def _find(self, key: str) -> Replica | None:
        """The session's replica; None if there is no such session. Raises if that replica is down, or may be."""
        home = self.known(key)
        if home is not None:
            self._known.move_to_end(key)
            return self._check_alive(home, key)
        alive = self._alive()
        found = await asyncio.gather(*(self._has_session(replica, key) for replica in alive))
        home = next((replica for replica, has in zip(alive, found, strict=True) if has), None)
        if home is not None:
            self._remember(key, home)
            return home
        if (known := self.known(key)) is not None:  # another call has found or created it
            return self._check_alive(known, key)
        if self.survives and (down := self._down()):
            raise ReplicaDownError(
                f"session {name_of(key)!r} is at none of the running replicas, and may be at one that is down; try "
                f"again later: {down[0].dead_error}"
            )
        return None

    async def _has_session(self, replica: Replica, key: str) -> bool:
        try:
            await replica.call_sessions(calls.GetSession(key))
        except SessionNotFoundError:
            return False
        return True

    def _check_alive(self, home: Replica, key: str) -> Replica:
        if home.death:
            raise ReplicaDownError(
                f"session {name_of(key)!r} is at a replica that is down; try again later: {home.dead_error}"
            )
        return home

    def _remember(self, key: str, home: Replica) -> None:
        self._known[key] = home.number
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _alive(self) -> list[Replica]:
        self._group.attach()
        return self._group.alive

    def _down(self) -> list[Replica]:
        return [replica for replica in self._group.replicas if replica.death]

    def _any_replica(self) -> Replica:
        return self._alive()[0]

    def _all_replicas(self) -> list[Replica]:
        """All replicas that may hold sessions; raises if one of them is down."""
        alive = self._alive()
        if self.survives and (down := self._down()):
            raise ReplicaDownError(
                f"some sessions are at a replica that is down; try again later: {down[0].dead_error}"
            )
        return alive

    @asynccontextmanager
    async def _creation_lock(self, key: str) -> AsyncIterator[None]:
        lock, users = self._creating.get(key, (asyncio.Lock(), 0))
        self._creating[key] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._creating.pop(key)
            if users > 1:
                self._creating[key] = lock, users - 1

    # Pages

    async def _page(self, op: calls.ListSessions) -> SessionAnswer:
        """The next sessions of all replicas, oldest first: merged from one page of each."""
        replicas = self._all_replicas()
        ops = [op] * len(replicas)
        if op.after is not None:
            home = await self._find(op.after) or self._any_replica()
            info = (await home.call_sessions(calls.GetSession(op.after))).info
            assert info is not None
            ops = [self._page_op(op, info.created, home, replica) for replica in replicas]
        answers = await asyncio.gather(
            *(replica.call_sessions(one) for replica, one in zip(replicas, ops, strict=True))
        )
        pages = [answer.page for answer in answers if answer.page is not None]
        merged = list(heapq.merge(*(page.sessions for page in pages), key=lambda info: info.created))
        use = _summed(page.use for page in pages)
        more = len(merged) > op.limit or any(page.after is not None for page in pages)
        return SessionAnswer(page=SessionPage(merged[: op.limit], 0 if more else None, use))

    def _page_op(self, op: calls.ListSessions, when: float, home: Replica, replica: Replica) -> calls.ListSessions:
        """The call for one replica's page. Sessions created at the same time are ordered by replica number."""
        if replica is home:
            return op
        bound = when if replica.number < home.number else math.nextafter(when, -math.inf)
        return msgspec.structs.replace(op, after=None, made_after=bound)


def _summed(uses: Iterable[SessionUse]) -> SessionUse:
    total = SessionUse()
    for use in uses:
        total.sessions, total.tokens, total.bytes = (
            total.sessions + use.sessions, total.tokens + use.tokens, total.bytes + use.bytes,
        )  # fmt: skip
    return total
