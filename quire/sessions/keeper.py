"""Sessions: conversations by name whose memory outlives their turns.

A session's tokens are in the `SessionStore`, durable, and that is the truth. Its KV is best effort and lies where there
is room: on the device between turns (IDLE: the session holds the blocks, the partial last one too), or in the tiers
below (ASLEEP: no device block is held). Each turn is a request (LIVE), which takes the session's blocks over and gives
them back, longer, when it ends. What was lost is computed again.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from quire.errors import SessionBusyError, StoreError, ValidationError
from quire.kvcache.offload.manager import OffloadManager
from quire.messages.request import NewRequest, Request
from quire.sessions.log import Session, SessionStore, name_of
from quire.sessions.log.exchange import check_model, decode_export, exported_bytes
from quire.sessions.log.names import check_name
from quire.sessions.log.state import unpack_tokens
from quire.sessions.session_kv import SessionKV

logger = logging.getLogger(__name__)

KEEP: Any = object()
"""Leave it as it is."""
TICK_SECONDS = 1.0
"""How often expiry and idleness are looked at."""


class Phase(enum.Enum):
    """Where a session's KV is."""

    LIVE = "live"
    """A turn is running."""
    IDLE = "idle"
    """On the device, held by the session."""
    ASLEEP = "asleep"
    """In the tiers below, or nowhere: the session holds no device block."""


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session as its users see it."""

    name: str
    phase: str
    num_tokens: int
    created: float
    used: float
    expires: float | None
    parent: str | None
    forked_at: int
    device_tokens: int
    """Tokens whose KV is on the device, held by the session."""
    kv_tokens: int
    """Tokens whose KV is, or was, put by when it last fell asleep."""
    meta: dict[str, str]
    lost: str | None
    """Why its tokens are lost, if they are."""


class SessionPage(msgspec.Struct, frozen=True):
    """Some sessions, in the order they were made; `after` asks for the next page, None: there is none."""

    sessions: list[SessionInfo]
    after: int | None


class SessionKeeper:
    """All sessions of an engine. Knows tokens and blocks, neither text nor tensors."""

    def __init__(
        self,
        store: SessionStore,
        kv: SessionKV,
        tiers: OffloadManager | None = None,
        idle_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        token_fingerprint: bytes = b"",
        scratch: TemporaryDirectory[str] | None = None,
    ) -> None:
        """`kv`: their blocks. `idle_seconds`: a session that has had no turn for so long falls asleep by itself.
        `token_fingerprint`: of what token ids mean. `scratch`: the store's folder, where it goes with the keeper."""
        self.store = store
        self.kv = kv
        self._tiers = tiers
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._token_fingerprint = token_fingerprint
        self._scratch = scratch
        self._ticked = clock()

    # What users ask for

    def create(
        self,
        name: str,
        tokens: Sequence[int] = (),
        *,
        salt: str = "",
        ttl: float | None = None,
        meta: Mapping[str, str] | None = None,
        durable: bool = True,
    ) -> SessionInfo:
        """A new session."""
        self.store.create(
            name, tokens, fingerprint=self._token_fingerprint, salt=salt, ttl=ttl, meta=meta, durable=durable
        )
        return self._shown(name)

    def append(self, name: str, tokens: Sequence[int], *, at: int | None = None, durable: bool = True) -> SessionInfo:
        """Add tokens, after the first `at` if said; they are computed with the next turn."""
        self._check_free(name)
        if at is not None:
            self.cut(name, at, durable=False)
        self.store.append(name, tokens, durable=durable)
        return self._shown(name)

    def rewrite(self, name: str, tokens: Sequence[int], *, salt: str = "", durable: bool = True) -> SessionInfo:
        """The session holds these tokens from now on; what they begin alike with it keeps its KV. It may be new."""
        if name not in self.store:
            return self.create(name, tokens, salt=salt, durable=durable)
        self._check_free(name)
        before, new = self.store.tokens(name), np.asarray(tokens, np.int32)
        same = min(len(before), len(new))
        differ = np.flatnonzero(before[:same] != new[:same])
        same = int(differ[0]) if len(differ) else same
        if same < len(before):
            self.store.truncate(name, same, durable=False)
            self.kv.cut(name, same)
        self.store.append(name, new[same:], durable=durable)
        return self._shown(name)

    def fork(self, name: str, new_name: str, at: int | None = None, *, durable: bool = True) -> SessionInfo:
        """A session with the same first tokens (all, unless said otherwise). It shares every block it can."""
        session = self.store.fork(name, new_name, at, durable=durable)
        self.kv.fork(name, new_name, session.num_tokens)
        return self._shown(new_name)

    def get(self, name: str) -> SessionInfo:
        """The session of that name."""
        self._end_expired()
        return self._shown(name)

    def page(self, after: int = 0, limit: int = 100, owner: str | None = None) -> SessionPage:
        """Up to `limit` sessions, in the order they were made; one owner's only, if said."""
        self._end_expired()
        page = self.store.page(after, limit, owner)
        return SessionPage([self._describe(session) for session in page.sessions], page.after)

    def count(self, owner: str) -> int:
        """How many sessions one owner has."""
        self._end_expired()
        return self.store.count(owner)

    def tokens(self, name: str, start: int = 0) -> list[int]:
        """The session's tokens, or those from `start` on (below 0: so many of the last)."""
        return self.store.tokens(name, start).tolist()

    def touch(self, name: str) -> SessionInfo:
        """The session is in use; raises if it is lost."""
        self.store.touch(name)
        return self._shown(name)

    def update(
        self, name: str, *, ttl: float | None = KEEP, meta: Mapping[str, str] | None = None, durable: bool = True
    ) -> SessionInfo:
        """Another time to live, or other notes."""
        changes = {} if ttl is KEEP else {"ttl": ttl}
        self.store.update(name, meta=meta, durable=durable, **changes)
        return self._shown(name)

    def cut(self, name: str, at: int, *, durable: bool = True) -> SessionInfo:
        """The session keeps its first `at` tokens, if it has more."""
        self._check_free(name)
        if at < self.store.get(name).num_tokens:
            self.store.truncate(name, at, durable=durable)
            self.kv.cut(name, at)
        return self._shown(name)

    def export(self, name: str) -> bytes:
        """The session's tokens and notes, to be taken elsewhere."""
        return exported_bytes(self.store, name)

    def import_(
        self,
        data: bytes,
        key: Callable[[str], str],
        *,
        salt: str = "",
        ttl: float | None = None,
        durable: bool = True,
    ) -> SessionInfo:
        """A new session of what `export` gave, here or elsewhere. `key`: what it goes by, given the name in there."""
        exported = decode_export(data)
        check_model(exported, self._token_fingerprint, "the file")
        tokens, name = unpack_tokens(exported.tokens), key(check_name(exported.name))
        return self.create(name, tokens, salt=salt, ttl=ttl, meta=exported.meta, durable=durable)  # type: ignore[arg-type]

    def suspend(self, name: str) -> SessionInfo:
        """The session gives its device blocks up, now or when its turn ends; copies take steps (`is_settled`)."""
        self.store.get(name)
        self.kv.suspend(name)
        return self._shown(name)

    def delete(self, name: str, *, durable: bool = True) -> None:
        """End a session. Its forks stay."""
        self._check_free(name)
        self.store.delete(name, durable=durable)
        self.kv.forget(name)

    def recover(self, name: str, *, durable: bool = True) -> SessionInfo:
        """Accept what is left of a lost session."""
        self.store.recover(name, durable=durable)
        return self._shown(name)

    def _check_free(self, name: str) -> None:
        if (live := self.kv.get(name)) is not None and live.turn:
            raise SessionBusyError(
                f"session {name_of(name)!r} is in the middle of a turn: wait for it to end, or abort it"
            )

    def _shown(self, name: str) -> SessionInfo:
        return self._describe(self.store.get(name))

    def _describe(self, session: Session) -> SessionInfo:
        live = self.kv.get(session.name)
        phase = Phase.ASLEEP if live is None else Phase.LIVE if live.turn else Phase.IDLE
        return SessionInfo(
            name=name_of(session.name), phase=phase.value, num_tokens=session.num_tokens, created=session.created,
            used=session.used, expires=session.expires,
            parent=None if session.parent is None else name_of(session.parent), forked_at=session.forked_at,
            device_tokens=0 if live is None else live.tokens, kv_tokens=session.kv_tokens, meta=session.meta,
            lost=session.lost,
        )  # fmt: skip

    # A turn

    def begin(self, source: NewRequest) -> int:
        """A request is the session's turn; returns how many of its tokens the tiers below may have."""
        self._check_free(source.session)
        session = self.store.get(source.session)
        if session.fingerprint != self._token_fingerprint:
            raise ValidationError(
                f"session {name_of(source.session)!r} was made with another model: its tokens mean nothing to this one",
                "session",
            )
        if source.num_sequences != 1 or source.beams is not None:
            raise ValidationError("a turn of a session has one sample: n must be 1", "n", source.num_sequences)
        if self.tokens(source.session) != source.prompt:
            raise SessionBusyError(
                f"session {name_of(source.session)!r} has changed since its tokens were read: begin again"
            )
        if session.salt != source.salt:  # its blocks lie under the salt it was made with
            source.salt, source.keys = session.salt, []
        self.store.touch(source.session)
        self.kv.begin(source.session, source.id)
        saved = session.kv_tokens if session.kv_fingerprint == self.kv.fingerprint else 0
        if not source.keys:
            source.keys = self.kv.known_keys(source.session, saved)
        return saved

    def end(self, request: Request, is_kept: bool) -> str | None:
        """The turn has ended; `is_kept`: what it said is part of the session. Returns why it could not be, if so."""
        name, wrong = request.source.session, None
        try:
            if is_kept and request.output:
                self.store.append(name, request.output, durable=False)
        except (StoreError, KeyError) as error:
            wrong = f"the answer is not in session {name_of(name)!r}: {error}"
            logger.error("request %s: %s", request.id, wrong)
        self.kv.end(name, is_sound=wrong is None)
        return wrong

    def commit(self, then: Callable[[], object], failed: Callable[[Exception], object] | None = None) -> None:
        """Call `then` when all that was done so far is durable. Where sessions end with the process, that is now.

        `failed` is called instead where it never will be; without it, the log has to do.
        """
        if self._tiers is None or self._tiers.disk is None:
            then()
            return

        def tell(error: Exception | None) -> None:
            if error is not None:
                logger.error("sessions could not be made durable: %s", error)
            if error is not None and failed is not None:
                failed(error)
            else:
                then()

        self._tiers.call(self.store.commit, tell)

    # What changes by itself

    def tick(self) -> None:
        """From time to time: expired sessions end, idle ones fall asleep."""
        now = self._clock()
        if now - self._ticked < TICK_SECONDS:
            return
        self._ticked = now
        self._end_expired()
        self.kv.sleep_idle(self._idle_seconds)

    def rest(self) -> float | None:
        """Tick, and tell in how many seconds to do so again; None where nothing changes by itself."""
        self.tick()
        waits = [TICK_SECONDS] if self.kv.num_live and self._idle_seconds is not None else []
        if (due := self.store.next_due) is not None:
            waits.append(min(max(TICK_SECONDS, due), 3600.0))
        return min(waits, default=None)

    def _end_expired(self) -> None:
        try:
            ended = self.store.sweep(durable=False)  # who comes back after a crash has expired just the same
        except StoreError as error:
            logger.warning("sessions whose time is over cannot be ended: %s", error)
            return
        for name in ended:
            self.kv.forget(name)

    def close(self) -> None:
        """Blocks come back; tokens are durable."""
        self.kv.forget_device()
        self.store.close()
        if self._scratch is not None:
            self._scratch.cleanup()
