"""Where sessions live, when there are several engines: each at one of them, for as long as it lives."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from quire.engine import session_calls as calls
from quire.engine.session_calls import SessionAnswer, SessionOp
from quire.errors import EngineDeadError, QuireError, ReplicaDownError, SessionExistsError, SessionNotFoundError
from quire.sessions.keeper import SessionInfo, SessionPage
from quire.sessions.log import name_of, session_key
from quire.sessions.log.export import decode_export
from quire.sessions.log.state import unpack_tokens

if TYPE_CHECKING:
    from quire.api.engine_group import EngineGroup
    from quire.api.replica import Replica

MOST = 1_000_000
"""Homes that are remembered; those of other sessions are asked for again."""


class SessionAffinity:
    """Answers questions about sessions by asking those who have them.

    A home is asked for once, when a name comes up that nobody knows, and then remembered. A name is given once: who
    makes a session waits for others who make one of the same name.
    """

    def __init__(self, fleet: EngineGroup, survives: bool) -> None:
        """`survives`: whether sessions outlive their engine."""
        self._fleet = fleet
        self._survives = survives
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._makers: dict[str, tuple[asyncio.Lock, int]] = {}
        """Names that are being given, and how many wish for each."""

    # What is known

    def known(self, key: str) -> Replica | None:
        """The session's home, as far as anybody knows."""
        number = self._homes.get(key)
        return None if number is None else self._fleet.replicas[number]

    def replica_of(self, key: str) -> Replica:
        """Where a turn of the session goes: home, or if it has none to anyone, who says so; raises if that is down."""
        home = self.known(key)
        return self._anyone() if home is None else self._up(home, key)

    def lose(self, replica: Replica) -> None:
        """The replica is dead, and with it, unless they survive, its sessions."""
        if not self._survives:
            for key in [key for key, number in self._homes.items() if number == replica.number]:
                del self._homes[key]

    # Asking

    async def ask_sessions(self, op: SessionOp) -> SessionAnswer:
        """Ask something about sessions. What it changed is durable when this returns."""
        match op:
            case calls.ListSessions():
                return await self._page(op)
            case calls.CountSessions():
                answers = await asyncio.gather(*(replica.ask_sessions(op) for replica in self._all()))
                return SessionAnswer(count=sum(answer.count or 0 for answer in answers))
            case calls.CreateSession(is_new=True):
                return await self._settle(op.key, self._fleet.choose_for(op.tokens, op.salt), op)
            case calls.CreateSession() | calls.RewriteSession():
                return await self._make(op.key, op, op.tokens, op.salt)
            case calls.ImportSession():
                given = decode_export(op.data)
                key = session_key(op.tenant, given.name if op.name is None else op.name)
                return await self._make(key, op, unpack_tokens(given.tokens).tolist(), op.salt)
            case calls.ForkSession():
                return await self._fork(op)
            case calls.DeleteSession():
                async with self._naming(op.key):  # who makes it anew meanwhile must not find its home forgotten
                    answer = await self._ask_home(op.key, op)
                    self._homes.pop(op.key, None)
                    return answer
        return await self._ask_home(op.key, op)

    async def _ask_home(self, key: str, op: SessionOp) -> SessionAnswer:
        """Whoever has the session answers; if nobody has, anyone, who says so."""
        home = await self._find(key)
        return await (self._anyone() if home is None else home).ask_sessions(op)

    async def _make(self, key: str, op: SessionOp, tokens: list[int], salt: str) -> SessionAnswer:
        """A session that may be new: then the router says where it lives."""
        async with self._naming(key):
            home = await self._find(key)
            return await self._settle(key, self._fleet.choose_for(tokens, salt) if home is None else home, op)

    async def _fork(self, op: calls.ForkSession) -> SessionAnswer:
        """A fork lives where its source does, and shares its blocks."""
        async with self._naming(op.new_key):
            home, there = await self._find(op.key), await self._find(op.new_key)
            if home is None:
                return await self._anyone().ask_sessions(op)  # which says that there is no such session
            if there is not None and there is not home and await self._has(there, op.new_key):
                raise SessionExistsError(
                    f"a session {name_of(op.new_key)!r} exists already: choose another name, or delete it",
                    "name",
                    op.new_key,
                )
            return await self._settle(op.new_key, home, op)

    async def _settle(self, key: str, home: Replica, op: SessionOp) -> SessionAnswer:
        """Make a session there. Its home is known before it is, so that what comes meanwhile goes the same way."""
        was_known = key in self._homes
        self._remember(key, home)
        try:
            return await home.ask_sessions(op)
        except EngineDeadError:  # it may have been made
            raise
        except QuireError:
            if not was_known:
                self._homes.pop(key, None)
            raise

    # Finding

    async def _find(self, key: str) -> Replica | None:
        """The session's home, which lives; None if there is no such session. Raises where nobody can tell."""
        home = self.known(key)
        if home is not None:
            self._homes.move_to_end(key)
            return self._up(home, key)
        living = self._living()
        found = await asyncio.gather(*(self._has(replica, key) for replica in living))
        home = next((replica for replica, has in zip(living, found, strict=True) if has), None)
        if home is not None:
            self._remember(key, home)
            return home
        if (known := self.known(key)) is not None:  # someone was quicker
            return self._up(known, key)
        if self._survives and (down := self._down()):
            raise ReplicaDownError(
                f"session {name_of(key)!r} is at none of the replicas that run, and may be at one that does not; try "
                f"again later: {down[0].dead_error}"
            )
        return None

    async def _has(self, replica: Replica, key: str) -> bool:
        try:
            await replica.ask_sessions(calls.GetSession(key))
        except SessionNotFoundError:
            return False
        return True

    def _up(self, home: Replica, key: str) -> Replica:
        if home.death:
            raise ReplicaDownError(
                f"session {name_of(key)!r} lives at a replica that is down; try again later: {home.dead_error}"
            )
        return home

    def _remember(self, key: str, home: Replica) -> None:
        self._homes[key] = home.number
        self._homes.move_to_end(key)
        if len(self._homes) > MOST:
            self._homes.popitem(last=False)

    def _living(self) -> list[Replica]:
        self._fleet.attach()
        return self._fleet.living

    def _down(self) -> list[Replica]:
        return [replica for replica in self._fleet.replicas if replica.death]

    def _anyone(self) -> Replica:
        return self._living()[0]

    def _all(self) -> list[Replica]:
        """Everyone who has sessions; raises if one of them is down."""
        living = self._living()
        if self._survives and (down := self._down()):
            raise ReplicaDownError(f"not all sessions can be seen now; try again later: {down[0].dead_error}")
        return living

    @asynccontextmanager
    async def _naming(self, key: str) -> AsyncIterator[None]:
        lock, wishes = self._makers.get(key, (asyncio.Lock(), 0))
        self._makers[key] = lock, wishes + 1
        try:
            async with lock:
                yield
        finally:
            lock, wishes = self._makers.pop(key)
            if wishes > 1:
                self._makers[key] = lock, wishes - 1

    # Pages

    async def _page(self, op: calls.ListSessions) -> SessionAnswer:
        """The next sessions of all replicas, in the order they were made: a page of each is enough for one of all."""
        replicas = self._all()
        asked = [op] * len(replicas)
        if op.after is not None:
            home = await self._find(op.after) or self._anyone()
            info = (await home.ask_sessions(calls.GetSession(op.after))).info
            assert info is not None
            asked = [self._after(op, info.created, home, replica) for replica in replicas]
        answers = await asyncio.gather(
            *(replica.ask_sessions(one) for replica, one in zip(replicas, asked, strict=True))
        )
        pages = [answer.page for answer in answers if answer.page is not None]
        merged = _merged([page.sessions for page in pages])
        more = len(merged) > op.limit or any(page.after is not None for page in pages)
        return SessionAnswer(page=SessionPage(merged[: op.limit], 0 if more else None))

    def _after(self, op: calls.ListSessions, when: float, home: Replica, replica: Replica) -> calls.ListSessions:
        """Of sessions made at the same time, those of the replica with the lower number come first."""
        if replica is home:
            return op
        bound = when if replica.number < home.number else math.nextafter(when, -math.inf)
        return msgspec.structs.replace(op, after=None, made_after=bound)


def _merged(pages: Sequence[Sequence[SessionInfo]]) -> list[SessionInfo]:
    return list(heapq.merge(*pages, key=lambda info: info.created))
