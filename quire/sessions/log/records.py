"""Changes of sessions as frames of the log, and their tokens read back.

Tokens are stored in chunks of 256, each linked to the chunk before it: sessions with the same beginning share chunks,
whether they were forked or not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from quire.errors import StoreError
from quire.sessions.log.catalog import Catalog, SessionEntry
from quire.sessions.log.chunks import TokenChunk
from quire.sessions.log.cleaning import Cleaner
from quire.sessions.log.format import TIME, Frame, FrameKind, digest_of
from quire.sessions.log.log import FrameAddress, SessionLog
from quire.sessions.log.spans import StoredSpan, spans_before
from quire.sessions.log.state import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    SessionState,
    lost_error,
    name_of,
    num_tokens,
    unpack_tokens,
)

logger = logging.getLogger(__name__)

MAX_FRAMES = 64
"""A session that consists of more frames is rewritten as one."""


class _DamagedError(Exception):
    """The tokens of a chunk are damaged."""

    def __init__(self, chunk: TokenChunk) -> None:
        super().__init__(f"chunk {chunk.id}")
        self.chunk = chunk


class SessionRecords:
    """Writes and reads sessions. Needs the store's lock. Every write also cleans the log a little."""

    def __init__(self, log: SessionLog, catalog: Catalog, cleaner: Cleaner) -> None:
        self._log, self._catalog, self._cleaner = log, catalog, cleaner
        self._last_read: tuple[int, int, np.ndarray] | None = None
        """The session read last: its id, its seq, and all its tokens."""

    # Writing

    def create(self, state: SessionState, data: bytes = b"") -> SessionEntry:
        """Add a session of this state, with the tokens in `data` appended."""
        # Lists of several stores are merged by these times: a clock that was set back must not change the order.
        state = msgspec.structs.replace(state, created=max(state.created, self._catalog.last_created))
        state, frames, chunks = self._with_tokens(state, data)
        number = self._catalog.new_id()
        frames.append(Frame(FrameKind.STATE, number, 0, msgspec.msgpack.encode(state), state.name))
        addresses = self._log.append(frames)
        self._add_chunks(chunks, addresses)
        entry = SessionEntry(number, 0, state, [addresses[-1]])
        self._catalog.add(entry)
        self._cleaner.clean()
        return entry

    def append(self, entry: SessionEntry, used: float, data: bytes, spans: Sequence[StoredSpan] = ()) -> None:
        """Append tokens to a session, used at this time, and the spans among them."""
        state = msgspec.structs.replace(entry.state, used=used)
        if spans:
            self.rewrite(entry, msgspec.structs.replace(state, spans=(*state.spans, *spans)), data)
            return
        if len(state.tail) + len(data) >= CHUNK_BYTES or len(entry.frames) >= MAX_FRAMES:
            self.rewrite(entry, state, data)
            return
        frame = Frame(FrameKind.APPEND, entry.id, entry.seq + 1, TIME.pack(used) + data)
        (address,) = self._log.append([frame])
        self._catalog.extend(entry, msgspec.structs.replace(state, tail=state.tail + data), address)
        self._cleaner.clean()

    def rewrite(self, entry: SessionEntry, state: SessionState, data: bytes = b"") -> None:
        """Replace the session's state, with the tokens in `data` appended. The STATE frame is last: it commits."""
        state, frames, chunks = self._with_tokens(state, data)
        addresses = self._log.append([*frames, entry.state_frame(state)])
        self._add_chunks(chunks, addresses)
        self._catalog.replace(entry, state, addresses[-1])
        self._cleaner.clean()

    def delete(self, entry: SessionEntry) -> None:
        """Delete a session."""
        frame = Frame(FrameKind.DELETE, entry.id, entry.seq + 1, b"", entry.state.name)
        (address,) = self._log.append([frame], freeing=True)
        self._catalog.remove(entry, address)
        self._cleaner.clean()

    def _with_tokens(self, state: SessionState, data: bytes) -> tuple[SessionState, list[Frame], list[TokenChunk]]:
        """The state with tokens appended, and frames for the chunks that are not stored yet."""
        if not data:
            return state, [], []
        data = state.tail + data
        tip, frames, chunks = state.tip, [], []
        full = len(data) - len(data) % CHUNK_BYTES
        for start in range(0, full, CHUNK_BYTES):
            piece = data[start : start + CHUNK_BYTES]
            digest = digest_of(piece)
            known = self._catalog.chunks.find(tip, digest)
            if known is None:
                known = self._catalog.new_id()
                frames.append(Frame(FrameKind.CHUNK, known, tip, piece))
                chunks.append(TokenChunk(known, tip, digest, FrameAddress(0, 0, 0)))
            tip = known
        state = msgspec.structs.replace(state, tip=tip, chunked=state.chunked + full // 4, tail=data[full:])
        return state, frames, chunks

    def _add_chunks(self, chunks: Sequence[TokenChunk], addresses: Sequence[FrameAddress]) -> None:
        for chunk, address in zip(chunks, addresses, strict=False):
            chunk.address = address
            self._catalog.add_chunk(chunk)

    # Reading

    def tokens(self, entry: SessionEntry, start: int, stop: int | None) -> np.ndarray:
        """The session's tokens from `start` to `stop`."""
        if self._last_read is not None and self._last_read[:2] == (entry.id, entry.seq):
            return self._last_read[2][slice(start, stop)]
        state, total = entry.state, num_tokens(entry.state)
        start, stop, _ = slice(start, stop).indices(total)
        first = start // CHUNK_TOKENS
        with self._damage_marked(entry):
            chunks = self._catalog.chunks.chain(state.tip)[first : -(-stop // CHUNK_TOKENS)]
            data = b"".join([*map(self._read_chunk, chunks), state.tail])
        base = min(CHUNK_TOKENS * first, state.chunked)
        tokens = unpack_tokens(data)[start - base : max(start, stop) - base]
        if len(tokens) == total:
            self._last_read = entry.id, entry.seq, tokens
        return tokens

    def truncated(self, entry: SessionEntry, at: int) -> SessionState:
        """The session's state with its first `at` tokens."""
        state = entry.state
        if at >= state.chunked:
            tip, chunked, tail = state.tip, state.chunked, state.tail[: 4 * (at - state.chunked)]
        else:
            chain, (full, rest) = self._catalog.chunks.chain(state.tip), divmod(at, CHUNK_TOKENS)
            with self._damage_marked(entry):
                tail = self._read_chunk(chain[full])[: 4 * rest] if rest else b""
            tip, chunked = (chain[full - 1] if full else 0), CHUNK_TOKENS * full
        kv_tokens = min(at, state.kv_tokens)
        spans = spans_before(state.spans, at)
        return msgspec.structs.replace(state, tip=tip, chunked=chunked, tail=tail, kv_tokens=kv_tokens, spans=spans)

    def _read_chunk(self, number: int) -> bytes:
        chunk = self._catalog.chunks[number]
        frame = self._log.read(chunk.address)
        if frame is None or frame.id != number:
            raise _DamagedError(chunk)
        return frame.payload

    @contextlib.contextmanager
    def _damage_marked(self, entry: SessionEntry) -> Iterator[None]:
        """While reading chunks of the session: mark it as lost if they are damaged, and raise a store's errors."""
        name = name_of(entry.state.name)
        try:
            yield
        except OSError as error:
            raise StoreError(f"cannot read session {name!r}: {error.strerror or error}") from error
        except _DamagedError as error:
            self._mark_lost(entry, error.chunk)
            raise lost_error(name, entry.state.lost) from None

    def _mark_lost(self, entry: SessionEntry, chunk: TokenChunk) -> None:
        depth = len(self._catalog.chunks.chain(chunk.parent))
        reason = "some of its tokens were damaged on disk"
        logger.error("session %r is lost: %s", entry.state.name, reason)
        lost = msgspec.structs.replace(
            entry.state, lost=reason, tip=chunk.parent, chunked=CHUNK_TOKENS * depth, tail=b"", kv_tokens=0,
            spans=tuple(span for span in entry.state.spans if span.stop <= CHUNK_TOKENS * depth),
        )  # fmt: skip
        self.rewrite(entry, lost)
