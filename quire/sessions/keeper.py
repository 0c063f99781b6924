"""Sessions: conversations by name whose KV outlives their turns.

A session's tokens are durable in the `SessionStore`. Its KV can be computed again, so it is kept only where there is
room: on the device between turns ("idle": the session holds the blocks, including the partial last one), or in the
tiers below ("asleep": it holds no device block). Each turn is a request ("live"), which takes the session's blocks and
returns them with its own when it ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from quire.errors import SessionBusyError, SessionQuotaError, StoreError, ValidationError
from quire.kvcache.offload.manager import OffloadManager
from quire.messages.media import PromptMedia, key_spans
from quire.messages.request import NewRequest, Request
from quire.sessions.log import Session, SessionStore, name_of
from quire.sessions.log.export import check_length, check_model, check_token_ids, decode_export, exported_bytes
from quire.sessions.log.spans import common_spans, restored_media, stored_spans
from quire.sessions.log.state import SessionUse, check_name, owner_of, unpack_tokens
from quire.sessions.quota import SessionQuota
from quire.sessions.session_kv import SessionKV

logger = logging.getLogger(__name__)

KEEP: Any = object()
"""Argument value: leave the setting as it is."""
PINS_AT_ONCE = 64
"""Chunks of 256 tokens whose stored blocks are pinned with one tick: a few milliseconds."""
TICK_SECONDS = 1.0
"""How often expired and idle sessions are searched for."""


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session as its users see it."""

    name: str
    phase: str
    """live: a turn is running. idle: its KV is on the device. asleep: it holds no device block."""
    num_tokens: int
    created: float
    used: float
    expires: float | None
    parent: str | None
    forked_at: int
    device_tokens: int
    """Tokens whose KV is in device blocks of the session."""
    kv_tokens: int
    """Tokens whose KV was offloaded when the session was last suspended."""
    meta: dict[str, str]
    lost: str | None
    """Why its tokens are lost, if they are."""


class SessionPage(msgspec.Struct, frozen=True):
    """Sessions in order of creation. Pass `after` to get the next page; None: this is the last."""

    sessions: list[SessionInfo]
    after: int | None
    use: SessionUse
    """What all sessions of the owner use, or of all owners."""


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
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        quota: SessionQuota | None = None,
        scratch: TemporaryDirectory[str] | None = None,
    ) -> None:
        """`kv`: the sessions' blocks. `idle_seconds`: suspend a session after this long without a turn.
        `token_fingerprint`: of the vocabulary. `vocab_size`: imported token ids are below it. `max_model_len`: imported
        sessions are not longer. `quota`: of each tenant. `scratch`: the store's folder, if it is to be removed on
        close."""
        self.store = store
        self.kv = kv
        self._tiers = tiers
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._token_fingerprint = token_fingerprint
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._quota = quota or SessionQuota()
        self._scratch = scratch
        self.refused = 0
        """Operations refused because of the quota."""
        self._ticked = clock()

    # Operations of users

    def create(
        self,
        name: str,
        tokens: Sequence[int] = (),
        *,
        salt: str = "",
        ttl: float | None = None,
        meta: Mapping[str, str] | None = None,
        media: PromptMedia | None = None,
        durable: bool = True,
    ) -> SessionInfo:
        """Create a session. `media`: what the tokens have in place of ids; pixels are not kept."""
        if name not in self.store:
            self._check_quota(name, len(tokens), 1, meta)
        spans = () if media is None else stored_spans(media, len(tokens), (), 0)
        self.store.create(
            name, tokens, fingerprint=self._token_fingerprint, salt=salt, ttl=ttl, meta=meta, spans=spans,
            durable=durable,
        )  # fmt: skip
        return self._info(name)

    def append(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        at: int | None = None,
        media: PromptMedia | None = None,
        durable: bool = True,
    ) -> SessionInfo:
        """Append tokens, after the first `at` if given; the next turn computes them. `media` as in `create`."""
        self._check_free(name)
        length = self.store.get(name).num_tokens
        self._check_quota(name, len(tokens) - (0 if at is None else length - at))
        if at is not None:
            self.cut(name, at, durable=False)
        session = self.store.get(name)
        spans = () if media is None else stored_spans(media, len(tokens), session.spans, session.num_tokens)
        self.store.append(name, tokens, spans=spans, durable=durable)
        return self._info(name)

    def rewrite(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        salt: str = "",
        media: PromptMedia | None = None,
        durable: bool = True,
    ) -> SessionInfo:
        """Replace the session's tokens, keeping the KV of the common prefix; creates the session if needed. `media` as
        in `create`."""
        if name not in self.store:
            return self.create(name, tokens, salt=salt, media=media, durable=durable)
        self._check_free(name)
        before, new = self.store.tokens(name), np.asarray(tokens, np.int32)
        self._check_quota(name, len(new) - len(before))
        same = min(len(before), len(new))
        differ = np.flatnonzero(before[:same] != new[:same])
        same = int(differ[0]) if len(differ) else same
        old = self.store.get(name).spans
        spans = () if media is None else stored_spans(media, len(new), (), 0)
        same = common_spans(old, spans, same)
        if same < len(before):
            self.store.truncate(name, same, durable=False)
            self.kv.cut(name, same)
        later = [span for span in spans if span.start >= same]
        self.store.append(name, new[same:], spans=later, durable=durable)
        return self._info(name)

    def fork(self, name: str, new_name: str, at: int | None = None, *, durable: bool = True) -> SessionInfo:
        """Create a session with the same first `at` tokens (default: all). They share blocks."""
        if new_name not in self.store:
            source = self.store.get(name)
            self._check_quota(new_name, at if isinstance(at, int) else source.num_tokens, 1, source.meta)
        session = self.store.fork(name, new_name, at, durable=durable)
        self.kv.fork(name, new_name, session.num_tokens)
        return self._info(new_name)

    def get(self, name: str) -> SessionInfo:
        """The session of that name."""
        self._delete_expired()
        return self._info(name)

    def page(self, after: int = 0, limit: int = 100, owner: str | None = None) -> SessionPage:
        """Up to `limit` sessions in order of creation, optionally of one owner."""
        self._delete_expired()
        page = self.store.page(after, limit, owner)
        sessions = [self._describe(session) for session in page.sessions]
        return SessionPage(sessions, page.after, self.store.use(owner))

    def use(self, owner: str) -> SessionUse:
        """What the owner's sessions use."""
        self._delete_expired()
        return self.store.use(owner)

    def tokens(self, name: str, start: int = 0) -> list[int]:
        """The session's tokens from `start` on; a negative `start` counts from the end."""
        return self.store.tokens(name, start).tolist()

    def touch(self, name: str) -> SessionInfo:
        """Mark the session as used now; raises if it is lost."""
        self.store.touch(name)
        return self._info(name)

    def update(
        self, name: str, *, ttl: float | None = KEEP, meta: Mapping[str, str] | None = None, durable: bool = True
    ) -> SessionInfo:
        """Change the time to live or the metadata."""
        changes = {} if ttl is KEEP else {"ttl": ttl}
        if meta:
            self._check_quota(name, 0, 0, meta)
        self.store.update(name, meta=meta, durable=durable, **changes)
        return self._info(name)

    def cut(self, name: str, at: int, *, durable: bool = True) -> SessionInfo:
        """Truncate the session to its first `at` tokens."""
        self._check_free(name)
        if at < self.store.get(name).num_tokens:
            self.store.truncate(name, at, durable=durable)
            self.kv.cut(name, at)
        return self._info(name)

    def export(self, name: str) -> bytes:
        """The session's tokens and metadata as the bytes of an export file."""
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
        """Create a session from exported bytes. `key`: maps the name in the export to the new session's key."""
        exported = decode_export(data)
        check_model(exported, self._token_fingerprint, "the file")
        check_token_ids(exported, self._vocab_size, "the file")
        check_length(exported, self._max_model_len, "the file")
        tokens, name = unpack_tokens(exported.tokens), key(check_name(exported.name))
        return self.create(name, tokens, salt=salt, ttl=ttl, meta=exported.meta, durable=durable)  # type: ignore[arg-type]

    def suspend(self, name: str) -> SessionInfo:
        """Offload the session's device blocks, now or when its turn ends. Copies take several steps: `kv.is_saved`."""
        self.store.get(name)
        self.kv.suspend(name)
        return self._info(name)

    def delete(self, name: str, *, durable: bool = True) -> None:
        """Delete a session. Its forks stay."""
        self._check_free(name)
        self.store.delete(name, durable=durable)
        self.kv.forget(name)

    def recover(self, name: str, *, durable: bool = True) -> SessionInfo:
        """Accept what is left of a lost session."""
        self.store.recover(name, durable=durable)
        return self._info(name)

    def _check_free(self, name: str) -> None:
        if (resident := self.kv.get(name)) is not None and resident.turn:
            raise SessionBusyError(f"session {name_of(name)!r} has a running turn: wait for it to end, or abort it")

    def _check_quota(self, name: str, tokens: int, sessions: int = 0, meta: Mapping[str, str] | None = None) -> None:
        """Raise if the owner of the session may not store this much more."""
        self._delete_expired()
        try:
            self._quota.check(self.store.use(owner_of(name)), sessions, tokens, meta)
        except SessionQuotaError:
            self.refused += 1
            raise

    def _info(self, name: str) -> SessionInfo:
        return self._describe(self.store.get(name))

    def _describe(self, session: Session) -> SessionInfo:
        resident = self.kv.get(session.name)
        phase = "asleep" if resident is None else "live" if resident.turn else "idle"
        return SessionInfo(
            name=name_of(session.name), phase=phase, num_tokens=session.num_tokens, created=session.created,
            used=session.used, expires=session.expires,
            parent=None if session.parent is None else name_of(session.parent), forked_at=session.forked_at,
            device_tokens=0 if resident is None else resident.tokens, kv_tokens=session.kv_tokens, meta=session.meta,
            lost=session.lost,
        )  # fmt: skip

    # Turns

    def begin(self, source: NewRequest) -> int:
        """Start a turn; returns how many of the session's tokens may have KV in the tiers below."""
        self._check_free(source.session)
        session = self.store.get(source.session)
        if session.fingerprint != self._token_fingerprint:
            raise ValidationError(
                f"session {name_of(source.session)!r} was created with another model, which has other token ids",
                "session",
            )
        if source.num_sequences != 1 or source.beams is not None:
            raise ValidationError("a turn of a session has one sequence: n must be 1", "n", source.num_sequences)
        if source.drawn:
            self._take_back_turn(source)
        if self.tokens(source.session) != source.prompt:
            raise SessionBusyError(
                f"session {name_of(source.session)!r} has changed since its tokens were read: try again"
            )
        self._check_quota(source.session, 1)
        if session.spans or source.media:
            self._restore_media(session, source)
        if session.salt != source.salt:  # its blocks have keys with the salt it was created with
            source.salt, source.keys = session.salt, []
        self.store.touch(source.session)
        self.kv.begin(source.session, source.id)
        identity = source.kv_identity
        saved = session.kv_tokens if session.kv_fingerprint == self.kv.fingerprint_of(identity) else 0
        if not source.keys and not identity:
            source.keys = self.kv.known_keys(source.session, saved)
        return saved

    def _restore_media(self, session: Session, source: NewRequest) -> None:
        """The turn reads the session's images: its own items bring the pixels of those that it has."""
        media = restored_media(session.spans, session.num_tokens, source.media)
        if source.spans and key_spans(source.media, source.spans) != session.key_spans:
            raise SessionBusyError(
                f"session {name_of(source.session)!r} has other images than those the turn was made for: try again"
            )
        if not source.spans:
            source.keys = []  # of the token ids alone
        source.media, source.spans = media.items, media.spans
        source.positions, source.position_delta = media.positions, media.position_delta

    def _take_back_turn(self, source: NewRequest) -> None:
        """A turn goes on after its engine died: that engine may have appended the whole output, and died before it
        reported the end. The output is appended again when this turn ends."""
        tokens = self.tokens(source.session)
        known = source.prompt + (source.drawn[0] or [])
        if len(tokens) > len(source.prompt) and tokens[: len(known)] == known:
            self.cut(source.session, len(source.prompt), durable=False)

    def end(self, request: Request, is_kept: bool) -> str | None:
        """End a turn; `is_kept`: append its output to the session. Returns the error if that failed."""
        name, failure = request.source.session, None
        try:
            if is_kept and request.output:
                self.store.append(name, request.output, durable=False)
        except (StoreError, KeyError) as error:
            failure = f"the output was not appended to session {name_of(name)!r}: {error}"
            logger.error("request %s: %s", request.id, failure)
        self.kv.end(name, is_stored=failure is None)
        return failure

    def commit(self, then: Callable[[], object], failed: Callable[[Exception], object] | None = None) -> None:
        """Call `then` when everything done so far is durable; at once if sessions end with the process.

        `failed` is called instead with the error of a failed commit; without it, `then` is called and the error logged.
        """
        if self._tiers is None or self._tiers.store is None:
            then()
            return

        def committed(error: Exception | None) -> None:
            if error is not None:
                logger.error("cannot commit sessions: %s", error)
            if error is not None and failed is not None:
                failed(error)
            else:
                then()

        self._tiers.run_in_thread(self.store.commit, committed)

    # Expiry and idleness

    def tick(self) -> None:
        """Once a TICK_SECONDS: delete expired sessions and suspend idle ones."""
        now = self._clock()
        if now - self._ticked < TICK_SECONDS:
            return
        self._ticked = now
        self._delete_expired()
        self.kv.suspend_idle(self._idle_seconds)
        self.kv.pin_loaded(PINS_AT_ONCE)

    def tick_idle(self) -> float | None:
        """Tick; returns after how many seconds to tick again, None if no session can expire or become idle."""
        self.tick()
        if self.kv.pin_loaded(PINS_AT_ONCE):
            return 0.0
        waits = [TICK_SECONDS] if self.kv.num_on_device and self._idle_seconds is not None else []
        if (due := self.store.next_due) is not None:
            waits.append(min(max(TICK_SECONDS, due), 3600.0))
        return min(waits, default=None)

    def _delete_expired(self) -> None:
        try:
            ended = self.store.sweep(durable=False)  # a session that a crash brings back is still expired
        except StoreError as error:
            logger.warning("cannot delete expired sessions: %s", error)
            return
        for name in ended:
            self.kv.forget(name)

    def close(self) -> None:
        """Release all device blocks and close the store."""
        self.kv.forget_device()
        self.store.close()
        if self._scratch is not None:
            self._scratch.cleanup()
