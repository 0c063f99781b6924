"""Pins on the stored KV blocks of sessions, so that other blocks are evicted first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.block_store import BlockStore
from quire.kvcache.offload.page_keys import keys_at_end, keys_of_blocks
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.media import KeySpan
from quire.sessions.log.state import CHUNK_TOKENS, Session
from quire.sessions.log.store import SessionStore


@dataclass(eq=False)
class _PinnedChunk:
    """The blocks of a chunk of tokens, pinned once for all sessions that contain it."""

    parent: tuple[str, int]
    keys: list[bytes]
    last: bytes
    """Key of the last full block up to the end of the chunk."""
    rest: np.ndarray
    """Tokens of the chunk after that block."""
    refs: int = 0


class PinnedBlocks:
    """Keys of the blocks that hold sessions' KV, and the pins on them.

    A session's last, partial block is a block like any other, under the key of its tokens: forks share it, and no
    other content has that key. Pinning a session costs only what it does not share with other pinned sessions.
    """

    def __init__(
        self,
        sessions: SessionStore,
        store: BlockStore,
        keys: ContentKeys,
        kv_fingerprint: bytes,
        tables: BlockTables | None = None,
    ) -> None:
        """`tables`: for a model of several cache groups, what these keep of a sequence."""
        self._sessions = sessions
        self._store = store
        self._keys = keys
        self._fingerprint = kv_fingerprint
        self._chunks: dict[tuple[str, int], _PinnedChunk] = {}
        """By lane and number. A lane is a salt and the images up to the end of the chunk: chunks of the same tokens
        have other keys in another lane. Number 0: the chunk before the first."""
        self._tables = tables
        self._pinned: dict[str, tuple[tuple[str, int], list[bytes], list[bytes]]] = {}
        """Session → last chunk, keys of the blocks after that chunk, and what is pinned for its end."""
        self._loaded: int | None = 0
        """Id of the last session that `pin_loaded` has pinned; None: it has pinned all."""

    def pin(self, name: str) -> None:
        """Pin the blocks with the session's KV as it is now; call it again after `set_kv`."""
        session = self._sessions.get(name)
        former = self._pinned.pop(name, None)
        if session.kv_fingerprint == self._fingerprint and session.kv_tokens and not session.lost:
            chain = self._sessions.chain(name)[: session.kv_tokens // CHUNK_TOKENS]
            rest = self._sessions.tokens(name, CHUNK_TOKENS * len(chain), session.kv_tokens)
            tip = self._pin_chain(session, chain)
            last, before = self._end_of(session.salt, tip)
            start = CHUNK_TOKENS * len(chain) - len(before)
            own, _, _ = self._keys_after(last, np.concatenate([before, rest]), session.key_spans, start)
            self._store.pin(self._pages(own))
            end = self._end_pages([*self._chunk_keys(tip), *own], session.kv_tokens)
            self._store.pin(end)
            self._pinned[name] = tip, own, end
        if former is not None:
            self._unpin(*former)

    def pin_loaded(self, limit: int) -> bool:
        """After the stores were opened: pin the blocks of more sessions, about `limit` chunks of them.
        Returns whether there are more: keys of all their tokens are computed, which takes a while."""
        while self._loaded is not None and limit > 0:
            page = self._sessions.page(self._loaded, 1)
            self._loaded = page.after  # before a session that may turn out to be damaged
            for session in page.sessions:
                limit -= 1 + session.kv_tokens // CHUNK_TOKENS
                self.pin(session.name)
        return self._loaded is not None

    def unpin(self, name: str) -> None:
        """The session or its KV is gone: unpin its blocks, except those that other sessions share."""
        former = self._pinned.pop(name, None)
        if former is not None:
            self._unpin(*former)

    def keys_of(self, name: str) -> list[bytes]:
        """Keys of the session's pinned blocks, in order; the last may be of a partial block."""
        tip, own, _ = self._pinned.get(name, (_NO_CHUNK, [], []))
        return [*self._chunk_keys(tip), *own]

    def pages_of(self, name: str) -> list[bytes]:
        """Keys of all pinned pages of the session: those of its blocks in order, then what else is kept at its end."""
        end = self._pinned.get(name, (_NO_CHUNK, [], []))[2]
        return [*self._pages(self.keys_of(name)), *end]

    def _chunk_keys(self, tip: tuple[str, int]) -> list[bytes]:
        """Keys of the blocks up to the end of chunk `tip`."""
        parts = []
        while tip[1]:
            chunk = self._chunks[tip]
            parts.append(chunk.keys)
            tip = chunk.parent
        return [key for part in reversed(parts) for key in part]

    def _pages(self, keys: list[bytes]) -> list[bytes]:
        """Keys of the pages that full groups have of these blocks."""
        return keys if self._tables is None else keys_of_blocks(self._tables, keys)

    def _end_pages(self, keys: list[bytes], tokens: int) -> list[bytes]:
        """Keys of the pages that other groups keep at the end of a sequence of blocks with these keys."""
        return [] if self._tables is None else keys_at_end(self._tables, keys, tokens)

    def last_keys(self) -> Iterator[tuple[str, bytes]]:
        """Pinned sessions, the latest first, each with the key of its last block."""
        for name, (tip, own, end) in reversed(self._pinned.items()):
            if self._tables is not None and not self._tables.has_full and end:
                yield name, end[-1]
            elif own:
                yield name, own[-1]
            elif tip[1]:
                yield name, self._chunks[tip].last

    def _pin_chain(self, session: Session, chain: list[int]) -> tuple[str, int]:
        """Pin the chunks of a chain, adding a reference to its last one, which is returned."""
        spans = session.key_spans
        chunks = [(_lane(session.salt, spans, CHUNK_TOKENS * (i + 1)), chain[i]) for i in range(len(chain))]
        known = len(chunks)
        while known and chunks[known - 1] not in self._chunks:
            known -= 1
        for i in range(known, len(chunks)):
            parent = chunks[i - 1] if i else _NO_CHUNK
            last, before = self._end_of(session.salt, parent)
            tokens = self._sessions.tokens(session.name, CHUNK_TOKENS * i, CHUNK_TOKENS * (i + 1))
            start = CHUNK_TOKENS * i - len(before)
            keys, last, rest = self._keys_after(last, np.concatenate([before, tokens]), spans, start, partial=False)
            self._store.pin(self._pages(keys))
            self._chunks[chunks[i]] = _PinnedChunk(parent, keys, last, rest)
            if parent[1]:
                self._chunks[parent].refs += 1
        if not chunks:
            return _NO_CHUNK
        self._chunks[chunks[-1]].refs += 1
        return chunks[-1]

    def _unpin(self, tip: tuple[str, int], own: list[bytes], end: list[bytes]) -> None:
        self._store.unpin(self._pages(own))
        self._store.unpin(end)
        while tip[1]:
            chunk = self._chunks[tip]
            chunk.refs -= 1
            if chunk.refs:
                return
            del self._chunks[tip]
            self._store.unpin(self._pages(chunk.keys))
            tip = chunk.parent

    def _end_of(self, salt: str, tip: tuple[str, int]) -> tuple[bytes, np.ndarray]:
        """Key of the last full block up to the end of chunk `tip`, and the tokens after it."""
        if not tip[1]:
            return self._keys.root(salt), np.empty(0, np.int32)
        chunk = self._chunks[tip]
        return chunk.last, chunk.rest

    def _keys_after(
        self, last: bytes, tokens: np.ndarray, spans: list[KeySpan], start: int, partial: bool = True
    ) -> tuple[list[bytes], bytes, np.ndarray]:
        """Keys of the blocks of `tokens`, which begin at `start`, after the block `last`; the last full one; and the
        tokens after that."""
        keys = self._keys.keys_after(last, tokens, spans, start)
        last = keys[-1] if keys else last
        done = len(keys) * self._keys.block_size
        rest = tokens[done:]
        if partial and len(rest):
            keys.append(self._keys.key_after(last, rest, spans, start + done))
        return keys, last, rest


_NO_CHUNK = ("", 0)


def _lane(salt: str, spans: list[KeySpan], end: int) -> str:
    """Names the salt, and the images that begin before `end`."""
    own = [span for span in spans if span.start < end]
    if not own:
        return salt
    parts = b"".join(b"%d %d %d " % (span.start, span.stop, span.offset) + span.digest for span in own)
    return f"{salt}\0{blake3(parts).hexdigest()}"
