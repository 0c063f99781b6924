"""Tokens in chunks of 256, each after another: sessions that begin alike share theirs, however they came to be."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.sessions.log.catalog import Catalog, TokenChunk
from quire.sessions.log.frames import Frame, FrameKind, digest_of
from quire.sessions.log.log import FrameAddress, SessionLog
from quire.sessions.log.state import CHUNK_BYTES, CHUNK_TOKENS, SessionState


class DamagedError(Exception):
    """A chunk's tokens are not what they were."""

    def __init__(self, chunk: TokenChunk) -> None:
        super().__init__(f"chunk {chunk.id}")
        self.chunk = chunk


class Chunks:
    """Reads and writes them. Works under the store's lock."""

    def __init__(self, log: SessionLog, catalog: Catalog) -> None:
        self._log, self._catalog = log, catalog

    def grown(self, state: SessionState, data: bytes) -> tuple[SessionState, list[Frame], list[TokenChunk]]:
        """The state with tokens added, and frames for the chunks that nobody wrote before."""
        data = state.tail + data
        tip, frames, chunks = state.tip, [], []
        full = len(data) - len(data) % CHUNK_BYTES
        for start in range(0, full, CHUNK_BYTES):
            piece = data[start : start + CHUNK_BYTES]
            digest = digest_of(piece)
            known = self._catalog.find_chunk(tip, digest)
            if known is None:
                known = self._catalog.new_id()
                frames.append(Frame(FrameKind.CHUNK, known, tip, piece))
                chunks.append(TokenChunk(known, tip, digest, FrameAddress(0, 0, 0)))
            tip = known
        grown = msgspec.structs.replace(state, tip=tip, chunked=state.chunked + full // 4, tail=data[full:])
        return grown, frames, chunks

    def keep(self, chunks: Sequence[TokenChunk], places: Sequence[FrameAddress]) -> None:
        """Their frames are written, at these places."""
        for chunk, place in zip(chunks, places, strict=False):
            chunk.place = place
            self._catalog.put_chunk(chunk)

    def chain(self, tip: int) -> list[int]:
        """Numbers of the chunks up to this one, in order."""
        chain = []
        while tip:
            chain.append(tip)
            tip = self._catalog.chunks[tip].parent
        return chain[::-1]

    def read(self, number: int) -> bytes:
        """A chunk's tokens; raises DamagedError, or OSError where the disk does not give them."""
        chunk = self._catalog.chunks[number]
        found = self._log.read(chunk.place)
        if found is None or found.id != number:
            raise DamagedError(chunk)
        return found.payload

    def span(self, state: SessionState, start: int, stop: int) -> tuple[int, bytes]:
        """Tokens of a session that include those from `start` to `stop`, and the place of the first of them."""
        first = start // CHUNK_TOKENS
        numbers = self.chain(state.tip)[first : -(-stop // CHUNK_TOKENS)]
        data = b"".join([*map(self.read, numbers), state.tail])
        return min(CHUNK_TOKENS * first, state.chunked), data

    def cut(self, state: SessionState, at: int) -> tuple[int, int, bytes]:
        """The last chunk, what is chunked, and the tail of a session's first `at` tokens."""
        if at >= state.chunked:
            return state.tip, state.chunked, state.tail[: 4 * (at - state.chunked)]
        chain, (full, rest) = self.chain(state.tip), divmod(at, CHUNK_TOKENS)
        tail = self.read(chain[full])[: 4 * rest] if rest else b""
        return (chain[full - 1] if full else 0), CHUNK_TOKENS * full, tail
