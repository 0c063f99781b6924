"""Sessions by name: make, add to, fork, list, end. Tokens are durable; the disk is the truth and memory its index."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from quire.errors import SessionExistsError, SessionNotFoundError, StoreError, StoreFullError, ValidationError
from quire.kvcache.offload.disk.errors import lost, unavailable
from quire.kvcache.offload.disk.ownership import Ownership
from quire.sessions.log.catalog import Catalog, SessionEntry, TokenChunk
from quire.sessions.log.checks import check_place, checked_meta, checked_ttl
from quire.sessions.log.chunks import Chunks, DamagedError
from quire.sessions.log.cleaning import Cleaner, state_frame
from quire.sessions.log.expiry import Expiry
from quire.sessions.log.frames import Frame, FrameKind
from quire.sessions.log.log import SessionLog
from quire.sessions.log.names import check_key, name_of
from quire.sessions.log.recovery import TIME, Recovery
from quire.sessions.log.state import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    Page,
    Session,
    SessionState,
    SessionStats,
    num_tokens,
    pack_tokens,
    unpack_tokens,
    view,
)

logger = logging.getLogger(__name__)

FILE_BYTES = 16 << 20
MAX_FRAMES = 64
"""A session told in more frames than this is told anew in one."""
_KEEP: Any = object()


Method = TypeVar("Method", bound=Callable[..., Any])


def _reclaiming(method: Method) -> Method:
    """What a full disk refuses is tried again if cleaning the log gives room."""

    @functools.wraps(method)
    def wrapper(store: SessionStore, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(store, *args, **kwargs)
        except StoreFullError:
            if not store._reclaim():
                raise
        return method(store, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


class SessionStore:
    """All sessions of a folder. Safe to call from many threads.

    What an operation changed is durable when it returns; with `durable=False`, when `commit` next returns. An operation
    that raises has changed nothing.
    """

    def __init__(self, owner: Ownership, log: SessionLog, lock: threading.RLock, clock: Callable[[], float]) -> None:
        self.folder = owner.folder
        self._owner = owner
        self._log = log
        self._lock = lock
        self._clock = clock
        self._catalog = Catalog()
        self._chunks = Chunks(log, self._catalog)
        self._expiry = Expiry(self._catalog)
        self._cleaner = Cleaner(log, self._catalog)
        self._damaged_bytes = 0
        self._last_read: tuple[int, int, np.ndarray] | None = None
        """All tokens of the session that was read last, with its id and the number of its last change."""
        self._closed = False

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        make_room: Callable[[int], object] | None = None,
        file_bytes: int = FILE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> SessionStore:
        """The sessions in `folder`. `make_room(bytes)` is asked to free disk before a full one refuses tokens."""
        path = Path(folder).expanduser().absolute()
        owner = Ownership(path)
        lock = threading.RLock()
        log = SessionLog(path, file_bytes, lock, make_room)
        store = cls(owner, log, lock, clock)
        try:
            store._load()
        except BaseException as error:
            log.close()
            owner.release()
            if isinstance(error, OSError):
                raise unavailable(path, error) from None
            raise
        return store

    def close(self) -> None:
        """Everything becomes durable and others may have the folder."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._log.close()
                self._owner.release()

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Looking

    def __len__(self) -> int:
        return len(self._catalog.by_id)

    def count(self, owner: str) -> int:
        """How many sessions one owner has."""
        with self._lock:
            return self._catalog.count(owner)

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.by_name

    def get(self, name: str) -> Session:
        """The session of that name, lost or not."""
        with self._lock:
            entry = self._entry(name)
            return view(entry.id, entry.state)

    def page(self, after: int = 0, limit: int = 100, owner: str | None = None) -> Page:
        """Up to `limit` sessions made after the one with the id `after`, in the order they were made; one owner's
        only, if said (`names.owner_id`)."""
        if not isinstance(limit, int) or limit < 1:
            raise ValidationError(f"limit is {limit!r}: a page holds at least one session", "limit", limit)
        with self._lock:
            entries, more = self._catalog.after(after, limit, owner)
            sessions = [view(entry.id, entry.state) for entry in entries]
        return Page(sessions, sessions[-1].id if more else None)

    def last_made(self, when: float, owner: str | None = None) -> int:
        """The id of the last session (of one owner, if said) made at that time or before; 0: there is none."""
        with self._lock:
            return self._catalog.last_made(when, owner)

    def lost(self) -> dict[str, str]:
        """Names of lost sessions, and why they are lost."""
        with self._lock:
            return {entry.state.name: entry.state.lost for entry in self._catalog.by_id.values() if entry.state.lost}

    def tokens(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The session's tokens, or those from `start` to `stop`. Raises if the session is lost."""
        with self._lock:
            entry = self._live(name)
            if self._last_read is not None and self._last_read[:2] == (entry.id, entry.seq):
                return self._last_read[2][slice(start, stop)]
            total = num_tokens(entry.state)
            start, stop, _ = slice(start, stop).indices(total)
            with self._reading(entry):
                base, data = self._chunks.span(entry.state, start, stop)
            tokens = unpack_tokens(data)[start - base : max(start, stop) - base]
            if len(tokens) == total:
                self._last_read = entry.id, entry.seq, tokens
        return tokens

    def chain(self, name: str) -> list[int]:
        """Numbers of the session's full chunks of 256 tokens, in order: sessions that share tokens share numbers."""
        with self._lock:
            return self._chunks.chain(self._live(name).state.tip)

    def stats(self) -> SessionStats:
        """What the store holds."""
        with self._lock:
            catalog = self._catalog
            return SessionStats(
                sessions=len(catalog.by_id), chunks=len(catalog.chunks), log_bytes=self._log.size,
                live_bytes=catalog.live, files=len(self._log.files), damaged_bytes=self._damaged_bytes,
            )  # fmt: skip

    # Changing

    @_reclaiming
    def create(
        self,
        name: str,
        tokens: Sequence[int] | np.ndarray = (),
        *,
        fingerprint: bytes = b"",
        salt: str = "",
        ttl: float | None = None,
        meta: Mapping[str, str] | None = None,
        durable: bool = True,
    ) -> Session:
        """A new session. `ttl`: seconds without use after which `sweep` ends it."""
        now = self._clock()
        state = SessionState(
            check_key(name), now, now, checked_ttl(ttl), fingerprint, salt, meta=checked_meta(meta or {})
        )  # fmt: skip
        data = pack_tokens(tokens)
        with self._lock:
            self._check_new(name)
            entry = self._begin(*self._chunks.grown(state, data))
        return self._done(entry, durable)

    @_reclaiming
    def append(self, name: str, tokens: Sequence[int] | np.ndarray, *, durable: bool = True) -> Session:
        """Add tokens to the session."""
        data = pack_tokens(tokens)
        with self._lock:
            entry = self._live(name)
            state = msgspec.structs.replace(entry.state, used=self._clock())
            if len(state.tail) + len(data) < CHUNK_BYTES and len(entry.places) < MAX_FRAMES:
                frame = Frame(FrameKind.APPEND, entry.id, entry.seq + 1, TIME.pack(state.used) + data)
                (place,) = self._log.append([frame])
                self._catalog.extend(entry, msgspec.structs.replace(state, tail=state.tail + data), place)
                self._cleaner.clean()
            else:
                self._retell(entry, *self._chunks.grown(state, data))
        return self._done(entry, durable)

    @_reclaiming
    def set_kv(self, name: str, tokens: int, fingerprint: bytes, *, durable: bool = False) -> Session:
        """KV of the session's first `tokens` tokens was handed to the block store of this fingerprint."""
        with self._lock:
            entry = self._live(name)
            if not 0 <= tokens <= num_tokens(entry.state):
                raise ValidationError(
                    f"KV of {tokens} tokens for session {name_of(name)!r} of {num_tokens(entry.state)}",
                    "tokens",
                    tokens,
                )
            self._retell(entry, msgspec.structs.replace(entry.state, kv_tokens=tokens, kv_fingerprint=fingerprint))
        return self._done(entry, durable)

    @_reclaiming
    def update(
        self,
        name: str,
        *,
        ttl: float | None = _KEEP,
        meta: Mapping[str, str] | None = None,
        durable: bool = True,
    ) -> Session:
        """Another time to live, or other notes."""
        with self._lock:
            entry = self._live(name)
            state = msgspec.structs.replace(entry.state, used=self._clock())
            if ttl is not _KEEP:
                state = msgspec.structs.replace(state, ttl=checked_ttl(ttl))
            if meta is not None:
                state = msgspec.structs.replace(state, meta=checked_meta(meta))
            self._retell(entry, state)
            self._expiry.watch(entry)
        return self._done(entry, durable)

    @_reclaiming
    def touch(self, name: str) -> None:
        """The session is in use, though nothing is added to it."""
        with self._lock:
            entry = self._live(name)
            now = self._clock()
            # Written only where it could matter, or a session that is read often would fill the log.
            if now - entry.state.used > min(60.0, (entry.state.ttl or 960.0) / 16):
                self._retell(entry, msgspec.structs.replace(entry.state, used=now))

    @_reclaiming
    def fork(self, name: str, new_name: str, at: int | None = None, *, durable: bool = True) -> Session:
        """A new session with the same first `at` tokens (all, unless said otherwise). Costs one small frame."""
        check_key(new_name)
        with self._lock:
            source = self._live(name)
            self._check_new(new_name)
            state = source.state
            at = num_tokens(state) if at is None else at
            check_place(state, at, "forked")
            with self._reading(source):
                tip, chunked, tail = self._chunks.cut(state, at)
            now = self._clock()
            entry = self._begin(
                msgspec.structs.replace(
                    state, name=new_name, created=now, used=now, parent=name, forked_at=at,
                    tip=tip, chunked=chunked, tail=tail, kv_tokens=min(at, state.kv_tokens),
                )
            )  # fmt: skip
        return self._done(entry, durable)

    @_reclaiming
    def truncate(self, name: str, at: int, *, durable: bool = True) -> Session:
        """Keep the session's first `at` tokens and forget the rest."""
        with self._lock:
            entry = self._live(name)
            check_place(entry.state, at, "cut")
            with self._reading(entry):
                tip, chunked, tail = self._chunks.cut(entry.state, at)
            self._retell(
                entry,
                msgspec.structs.replace(
                    entry.state, used=self._clock(), tip=tip, chunked=chunked, tail=tail,
                    kv_tokens=min(at, entry.state.kv_tokens),
                ),
            )  # fmt: skip
        return self._done(entry, durable)

    @_reclaiming
    def delete(self, name: str, *, durable: bool = True) -> None:
        """End the session, lost or not. Its forks stay."""
        with self._lock:
            entry = self._entry(name)
            (place,) = self._log.append([Frame(FrameKind.DELETE, entry.id, entry.seq + 1, b"", name)], freeing=True)
            self._catalog.remove(entry, place)
            self._cleaner.clean()
        if durable:
            self._log.commit()

    @_reclaiming
    def recover(self, name: str, *, durable: bool = True) -> Session:
        """Accept what is left of a lost session: the tokens before the damage."""
        with self._lock:
            entry = self._entry(name)
            self._retell(entry, msgspec.structs.replace(entry.state, lost="", used=self._clock()))
        return self._done(entry, durable)

    def sweep(self, limit: int = 1000, *, durable: bool = True) -> list[str]:
        """End sessions whose time is over, at most `limit`; returns their names."""
        ended: list[str] = []
        with self._lock:
            for entry in self._expiry.over(self._clock()):
                if len(ended) == limit:
                    self._expiry.watch(entry)
                    break
                try:
                    self.delete(entry.state.name, durable=False)
                except StoreError:
                    self._expiry.watch(entry)
                    raise
                ended.append(entry.state.name)
        if ended and durable:
            self._log.commit()
        return ended

    @property
    def next_due(self) -> float | None:
        """Seconds until `sweep` may have something to do; None if it never will."""
        with self._lock:
            due = self._expiry.next
            return None if due is None else due - self._clock()

    def tidy(self) -> bool:
        """Clean a little more of the log than operations do by themselves; False when there is nothing to clean."""
        with self._lock:
            return self._cleaner.clean()

    def commit(self) -> None:
        """All that was done so far is durable when this returns."""
        self._log.commit()

    # Inside, with the lock held

    def _entry(self, name: str) -> SessionEntry:
        entry = self._catalog.by_name.get(name)
        if entry is None:
            raise SessionNotFoundError(f"there is no session {name_of(check_key(name))!r}")
        return entry

    def _live(self, name: str) -> SessionEntry:
        entry = self._entry(name)
        if entry.state.lost:
            raise lost(name_of(name), entry.state.lost)
        return entry

    def _check_new(self, name: str) -> None:
        if name in self._catalog.by_name:
            raise SessionExistsError(
                f"a session {name_of(name)!r} exists already: choose another name, or delete it", "name", name
            )

    def _done(self, entry: SessionEntry, durable: bool) -> Session:
        session = view(entry.id, entry.state)
        if durable:
            self._log.commit()
        return session

    def _begin(
        self, state: SessionState, frames: Sequence[Frame] = (), chunks: Sequence[TokenChunk] = ()
    ) -> SessionEntry:
        # Lists of several stores are merged by these times: a clock that was set back must not change the order.
        state = msgspec.structs.replace(state, created=max(state.created, self._catalog.last_created))
        number = self._catalog.new_id()
        places = self._log.append(
            [*frames, Frame(FrameKind.STATE, number, 0, msgspec.msgpack.encode(state), state.name)]
        )
        self._chunks.keep(chunks, places)
        entry = SessionEntry(number, 0, state, [places[-1]])
        self._catalog.put(entry)
        self._expiry.watch(entry)
        self._cleaner.clean()
        return entry

    def _retell(
        self, entry: SessionEntry, state: SessionState, frames: Sequence[Frame] = (), chunks: Sequence[TokenChunk] = ()
    ) -> None:
        """Say all of the session anew. One frame, written last, decides."""
        places = self._log.append([*frames, state_frame(entry, state)])
        self._chunks.keep(chunks, places)
        self._catalog.replace(entry, state, places[-1])
        self._cleaner.clean()

    @contextlib.contextmanager
    def _reading(self, entry: SessionEntry) -> Iterator[None]:
        """Reading a session's chunks; if they have been damaged meanwhile, it is lost."""
        try:
            yield
        except OSError as error:
            name = name_of(entry.state.name)
            raise StoreError(f"session {name!r} cannot be read: {error.strerror or error}") from error
        except DamagedError as error:
            self._lose(entry, error.chunk)
            raise lost(name_of(entry.state.name), entry.state.lost) from None

    def _lose(self, entry: SessionEntry, chunk: TokenChunk) -> None:
        depth = len(self._chunks.chain(chunk.parent))
        lost = msgspec.structs.replace(
            entry.state, lost="some of its tokens were damaged on disk", tip=chunk.parent,
            chunked=CHUNK_TOKENS * depth, tail=b"", kv_tokens=0,
        )  # fmt: skip
        logger.error("session %r is lost: some of its tokens were damaged on disk", entry.state.name)
        self._retell(entry, lost)

    def _reclaim(self) -> bool:
        with self._lock:
            return self._cleaner.reclaim()

    # Opening

    def _load(self) -> None:
        recovery = Recovery(self._catalog)
        for loaded in self._log.load():
            recovery.read(loaded)
        recovery.finish()
        self._damaged_bytes = recovery.damaged_bytes
        self._log.names = self._catalog.name_of
        for entry in self._catalog.by_id.values():
            self._expiry.watch(entry)
        for entry in recovery.lost:
            logger.error("session %r is lost: %s", entry.state.name, entry.state.lost)
        try:
            recovery.note(self._log)
        except StoreError as error:
            logger.warning("what was found could not be noted in %s: %s", self.folder, error)
