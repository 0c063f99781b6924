"""Sessions by name: create, append, fork, list, delete. Tokens are durable in the log; memory holds its index."""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from quire.errors import SessionNotFoundError, StoreError, StoreFullError, ValidationError
from quire.kvcache.offload.disk.files import FolderLock, unavailable
from quire.sessions.log.catalog import Catalog, ExpiryQueue, SessionEntry
from quire.sessions.log.cleaning import Cleaner
from quire.sessions.log.log import SessionLog
from quire.sessions.log.records import SessionRecords
from quire.sessions.log.recovery import Recovery
from quire.sessions.log.spans import StoredSpan
from quire.sessions.log.state import (
    Page,
    Session,
    SessionState,
    SessionStats,
    SessionUse,
    check_key,
    check_position,
    checked_meta,
    checked_ttl,
    exists_error,
    lost_error,
    name_of,
    num_tokens,
    pack_tokens,
    view,
)

logger = logging.getLogger(__name__)

FILE_BYTES = 16 << 20
_KEEP: Any = object()

Method = TypeVar("Method", bound=Callable[..., Any])


def _retried_after_cleaning(method: Method) -> Method:
    """If the disk is full, clean the log and try once more."""

    @functools.wraps(method)
    def wrapper(store: SessionStore, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(store, *args, **kwargs)
        except StoreFullError:
            with store._lock:
                if not store._cleaner.reclaim():
                    raise
        return method(store, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


class SessionStore:
    """All sessions of a folder. Thread-safe.

    A change is durable when the operation returns; with `durable=False`, when `commit` next returns. An operation that
    raises has changed nothing.
    """

    def __init__(
        self, folder_lock: FolderLock, log: SessionLog, lock: threading.RLock, clock: Callable[[], float]
    ) -> None:
        self.folder = folder_lock.folder
        self._folder_lock = folder_lock
        self._log = log
        self._lock = lock
        self._clock = clock
        self._catalog = Catalog()
        self._expiry = ExpiryQueue(self._catalog)
        self._cleaner = Cleaner(log, self._catalog)
        self._records = SessionRecords(log, self._catalog, self._cleaner)
        self._damaged_bytes = 0
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
        """The sessions in `folder`. On a full disk, `make_room(bytes)` is called before an operation is refused."""
        path = Path(folder).expanduser().absolute()
        folder_lock = FolderLock(path)
        lock = threading.RLock()
        log = SessionLog(path, file_bytes, lock, make_room)
        store = cls(folder_lock, log, lock, clock)
        try:
            store._load()
        except BaseException as error:
            log.close()
            folder_lock.release()
            if isinstance(error, OSError):
                raise unavailable(path, error) from None
            raise
        return store

    def close(self) -> None:
        """Make everything durable and unlock the folder."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._log.close()
                self._folder_lock.release()

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading

    def __len__(self) -> int:
        return len(self._catalog.by_id)

    def count(self, owner: str) -> int:
        """How many sessions the owner has."""
        with self._lock:
            return self._catalog.count(owner)

    def use(self, owner: str | None = None) -> SessionUse:
        """What the owner's sessions use now; without an owner, what all do."""
        with self._lock:
            return copy.copy(self._catalog.total if owner is None else self._catalog.use(owner))

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.by_name

    def get(self, name: str) -> Session:
        """The session of that name, even if it is lost."""
        with self._lock:
            entry = self._entry(name)
            return view(entry.id, entry.state)

    def page(self, after: int = 0, limit: int = 100, owner: str | None = None) -> Page:
        """Up to `limit` sessions created after the one with id `after`, in order of creation, optionally of one owner
        (`owner_id`)."""
        if not isinstance(limit, int) or limit < 1:
            raise ValidationError(f"limit is {limit!r}: a page holds at least one session", "limit", limit)
        with self._lock:
            entries, more = self._catalog.page(after, limit, owner)
            sessions = [view(entry.id, entry.state) for entry in entries]
        return Page(sessions, sessions[-1].id if more else None)

    def last_id_at(self, when: float, owner: str | None = None) -> int:
        """The id of the last session created at that time or before, optionally of one owner; 0: none."""
        with self._lock:
            return self._catalog.last_id_at(when, owner)

    def tokens(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The session's tokens from `start` to `stop`. Raises if the session is lost."""
        with self._lock:
            return self._records.tokens(self._intact(name), start, stop)

    def chain(self, name: str) -> list[int]:
        """Numbers of the session's full chunks of 256 tokens, in order. Sessions that begin alike share chunks."""
        with self._lock:
            return self._catalog.chunks.chain(self._intact(name).state.tip)

    def stats(self) -> SessionStats:
        """What the store holds."""
        with self._lock:
            catalog = self._catalog
            return SessionStats(
                sessions=len(catalog.by_id), chunks=len(catalog.chunks), log_bytes=self._log.size,
                live_bytes=catalog.live, files=len(self._log.files), damaged_bytes=self._damaged_bytes,
            )  # fmt: skip

    # Writing

    @_retried_after_cleaning
    def create(
        self,
        name: str,
        tokens: Sequence[int] | np.ndarray = (),
        *,
        fingerprint: bytes = b"",
        salt: str = "",
        ttl: float | None = None,
        meta: Mapping[str, str] | None = None,
        spans: Sequence[StoredSpan] = (),
        durable: bool = True,
    ) -> Session:
        """Create a session. `ttl`: seconds without use after which `sweep` deletes it. `spans`: what it has in place of
        token ids."""
        now = self._clock()
        state = SessionState(
            check_key(name), now, now, checked_ttl(ttl), fingerprint, salt, meta=checked_meta(meta or {}),
            spans=tuple(spans),
        )  # fmt: skip
        data = pack_tokens(tokens)
        with self._lock:
            self._check_new(name)
            entry = self._records.create(state, data)
            self._expiry.watch(entry)
        return self._committed(entry, durable)

    @_retried_after_cleaning
    def append(
        self,
        name: str,
        tokens: Sequence[int] | np.ndarray,
        *,
        spans: Sequence[StoredSpan] = (),
        durable: bool = True,
    ) -> Session:
        """Append tokens to the session, and what they have in place of ids."""
        data = pack_tokens(tokens)
        with self._lock:
            entry = self._intact(name)
            self._records.append(entry, self._clock(), data, spans)
        return self._committed(entry, durable)

    @_retried_after_cleaning
    def set_kv(self, name: str, tokens: int, fingerprint: bytes, *, durable: bool = False) -> Session:
        """Record that KV of the first `tokens` tokens was handed to the block store of this fingerprint."""
        with self._lock:
            entry = self._intact(name)
            if not 0 <= tokens <= num_tokens(entry.state):
                raise ValidationError(
                    f"KV of {tokens} tokens for session {name_of(name)!r} of {num_tokens(entry.state)}",
                    "tokens",
                    tokens,
                )
            self._records.rewrite(
                entry, msgspec.structs.replace(entry.state, kv_tokens=tokens, kv_fingerprint=fingerprint)
            )
        return self._committed(entry, durable)

    @_retried_after_cleaning
    def update(
        self,
        name: str,
        *,
        ttl: float | None = _KEEP,
        meta: Mapping[str, str] | None = None,
        durable: bool = True,
    ) -> Session:
        """Change the time to live or the metadata."""
        with self._lock:
            entry = self._intact(name)
            state = msgspec.structs.replace(entry.state, used=self._clock())
            if ttl is not _KEEP:
                state = msgspec.structs.replace(state, ttl=checked_ttl(ttl))
            if meta is not None:
                state = msgspec.structs.replace(state, meta=checked_meta(meta))
            self._records.rewrite(entry, state)
            self._expiry.watch(entry)
        return self._committed(entry, durable)

    @_retried_after_cleaning
    def touch(self, name: str) -> None:
        """Mark the session as used now."""
        with self._lock:
            entry = self._intact(name)
            now = self._clock()
            # Written at most once a minute, or a session that is read often would fill the log.
            if now - entry.state.used > min(60.0, (entry.state.ttl or 960.0) / 16):
                self._records.rewrite(entry, msgspec.structs.replace(entry.state, used=now))

    @_retried_after_cleaning
    def fork(self, name: str, new_name: str, at: int | None = None, *, durable: bool = True) -> Session:
        """Create a session with the same first `at` tokens (default: all). Writes one small frame."""
        check_key(new_name)
        with self._lock:
            source = self._intact(name)
            self._check_new(new_name)
            at = num_tokens(source.state) if at is None else at
            check_position(source.state, at, "forked")
            state, now = self._records.truncated(source, at), self._clock()
            entry = self._records.create(
                msgspec.structs.replace(state, name=new_name, created=now, used=now, parent=name, forked_at=at)
            )
            self._expiry.watch(entry)
        return self._committed(entry, durable)

    @_retried_after_cleaning
    def truncate(self, name: str, at: int, *, durable: bool = True) -> Session:
        """Keep the session's first `at` tokens."""
        with self._lock:
            entry = self._intact(name)
            check_position(entry.state, at, "cut")
            state = self._records.truncated(entry, at)
            self._records.rewrite(entry, msgspec.structs.replace(state, used=self._clock()))
        return self._committed(entry, durable)

    @_retried_after_cleaning
    def delete(self, name: str, *, durable: bool = True) -> None:
        """Delete the session, even if it is lost. Its forks stay."""
        with self._lock:
            self._records.delete(self._entry(name))
        if durable:
            self._log.commit()

    @_retried_after_cleaning
    def recover(self, name: str, *, durable: bool = True) -> Session:
        """Keep what is left of a lost session: the tokens before the damage."""
        with self._lock:
            entry = self._entry(name)
            self._records.rewrite(entry, msgspec.structs.replace(entry.state, lost="", used=self._clock()))
        return self._committed(entry, durable)

    def sweep(self, limit: int = 1000, *, durable: bool = True) -> list[str]:
        """Delete at most `limit` expired sessions; returns their names."""
        deleted: list[str] = []
        with self._lock:
            for entry in self._expiry.expired(self._clock()):
                if len(deleted) == limit:
                    self._expiry.watch(entry)
                    break
                try:
                    self.delete(entry.state.name, durable=False)
                except StoreError:
                    self._expiry.watch(entry)
                    raise
                deleted.append(entry.state.name)
        if deleted and durable:
            self._log.commit()
        return deleted

    @property
    def next_due(self) -> float | None:
        """Seconds until the next session may expire; None: none will."""
        with self._lock:
            due = self._expiry.next
            return None if due is None else due - self._clock()

    def commit(self) -> None:
        """Everything done so far is durable when this returns."""
        self._log.commit()

    # With the lock held

    def _entry(self, name: str) -> SessionEntry:
        entry = self._catalog.by_name.get(name)
        if entry is None:
            raise SessionNotFoundError(f"there is no session {name_of(check_key(name))!r}")
        return entry

    def _intact(self, name: str) -> SessionEntry:
        entry = self._entry(name)
        if entry.state.lost:
            raise lost_error(name_of(name), entry.state.lost)
        return entry

    def _check_new(self, name: str) -> None:
        if name in self._catalog.by_name:
            raise exists_error(name)

    def _committed(self, entry: SessionEntry, durable: bool) -> Session:
        """The session as callers see it, once it is durable if `durable`."""
        session = view(entry.id, entry.state)
        if durable:
            self._log.commit()
        return session

    # Opening

    def _load(self) -> None:
        recovery = Recovery(self._catalog, self._log)
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
            recovery.write_findings()
        except StoreError as error:
            logger.warning("cannot write the results of recovery in %s: %s", self.folder, error)
