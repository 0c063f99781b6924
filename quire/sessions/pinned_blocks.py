"""Pins on the stored KV blocks of sessions, so that other blocks are evicted first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.block_store import BlockStore
from quire.kvcache.offload.page_keys import keys_at_end, keys_of_blocks
from quire.kvcache.prefix_cache import ContentKeys
from quire.sessions.log.state import CHUNK_TOKENS
from quire.sessions.log.store import SessionStore


@dataclass(eq=False)
class _PinnedChunk:
    """The blocks of a chunk of tokens, pinned once for all sessions that contain it."""

    parent: int
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
        self._tables = tables
        self._pinned: dict[str, tuple[str, int, list[bytes], list[bytes]]] = {}
        """Session → salt, last chunk, keys of the blocks after that chunk, and what is pinned for its end."""
        self._loaded: int | None = 0
        """Id of the last session that `pin_loaded` has pinned; None: it has pinned all."""

    def pin(self, name: str) -> None:
        """Pin the blocks with the session's KV as it is now; call it again after `set_kv`."""
        session = self._sessions.get(name)
        former = self._pinned.pop(name, None)
        if session.kv_fingerprint == self._fingerprint and session.kv_tokens and not session.lost:
            chain = self._sessions.chain(name)[: session.kv_tokens // CHUNK_TOKENS]
            rest = self._sessions.tokens(name, CHUNK_TOKENS * len(chain), session.kv_tokens)
            tip = self._pin_chain(session.salt, name, chain)
            last, before = self._end_of(session.salt, tip)
            own, _, _ = self._keys_after(last, np.concatenate([before, rest]))
            self._store.pin(self._pages(own))
            end = self._end_pages([*self._chunk_keys(session.salt, tip), *own], session.kv_tokens)
            self._store.pin(end)
            self._pinned[name] = session.salt, tip, own, end
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
        salt, tip, own, _ = self._pinned.get(name, ("", 0, [], []))
        return [*self._chunk_keys(salt, tip), *own]

    def _chunk_keys(self, salt: str, tip: int) -> list[bytes]:
        """Keys of the blocks up to the end of chunk `tip`."""
        parts = []
        while tip:
            chunk = self._chunks[salt, tip]
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
        for name, (salt, tip, own, end) in reversed(self._pinned.items()):
            if self._tables is not None and not self._tables.has_full and end:
                yield name, end[-1]
            elif own:
                yield name, own[-1]
            elif tip:
                yield name, self._chunks[salt, tip].last

    def _pin_chain(self, salt: str, name: str, chain: list[int]) -> int:
        """Pin the chunks of a chain, adding a reference to its last one; returns that chunk's number, 0 for none."""
        known = len(chain)
        while known and (salt, chain[known - 1]) not in self._chunks:
            known -= 1
        for i in range(known, len(chain)):
            parent = chain[i - 1] if i else 0
            last, before = self._end_of(salt, parent)
            tokens = self._sessions.tokens(name, CHUNK_TOKENS * i, CHUNK_TOKENS * (i + 1))
            keys, last, rest = self._keys_after(last, np.concatenate([before, tokens]), partial=False)
            self._store.pin(self._pages(keys))
            self._chunks[salt, chain[i]] = _PinnedChunk(parent, keys, last, rest)
            if parent:
                self._chunks[salt, parent].refs += 1
        if not chain:
            return 0
        self._chunks[salt, chain[-1]].refs += 1
        return chain[-1]

    def _unpin(self, salt: str, tip: int, own: list[bytes], end: list[bytes]) -> None:
        self._store.unpin(self._pages(own))
        self._store.unpin(end)
        while tip:
            chunk = self._chunks[salt, tip]
            chunk.refs -= 1
            if chunk.refs:
                return
            del self._chunks[salt, tip]
            self._store.unpin(self._pages(chunk.keys))
            tip = chunk.parent

    def _end_of(self, salt: str, tip: int) -> tuple[bytes, np.ndarray]:
        """Key of the last full block up to the end of chunk `tip`, and the tokens after it."""
        if not tip:
            return self._keys.root(salt), np.empty(0, np.int32)
        chunk = self._chunks[salt, tip]
        return chunk.last, chunk.rest

    def _keys_after(
        self, last: bytes, tokens: np.ndarray, partial: bool = True
    ) -> tuple[list[bytes], bytes, np.ndarray]:
        """Keys of the blocks of `tokens` after the block `last`; the last full one; and the tokens after that."""
        keys = self._keys.keys_after(last, tokens)
        last = keys[-1] if keys else last
        rest = tokens[len(keys) * self._keys.block_size :]
        if partial and len(rest):
            keys.append(self._keys.key_after(last, rest))
        return keys, last, rest
