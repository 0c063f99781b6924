"""Which KV blocks sessions own on disk, so that anonymous ones go first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.kvcache.offload.disk.store import DiskStore
from quire.kvcache.prefix_cache import ContentKeys
from quire.sessions.log.state import CHUNK_TOKENS
from quire.sessions.log.store import SessionStore


@dataclass(eq=False)
class _Chunk:
    """A chunk's blocks, pinned once for all sessions that go through it."""

    parent: int
    keys: list[bytes]
    last: bytes
    """Key of the last full block up to the end of the chunk."""
    rest: np.ndarray
    """Tokens of the chunk after that block."""
    refs: int = 0


class PinnedBlocks:
    """Keys of the blocks that hold sessions' KV, and the pins on them.

    A session's last, partial block is a block like any other, under the key of the tokens it holds: forks share it, and
    no other content can be taken for it. Holding a session costs what it does not share with others held.
    """

    def __init__(self, sessions: SessionStore, disk: DiskStore, keys: ContentKeys, kv_fingerprint: bytes) -> None:
        self._sessions = sessions
        self._disk = disk
        self._keys = keys
        self._fingerprint = kv_fingerprint
        self._chunks: dict[tuple[str, int], _Chunk] = {}
        self._held: dict[str, tuple[str, int, list[bytes]]] = {}

    def keys_of(self, name: str) -> list[bytes]:
        """Keys of the session's blocks with KV, in order; the last may be of a partial block."""
        session = self._sessions.get(name)
        if session.kv_fingerprint != self._fingerprint or not session.kv_tokens:
            return []
        tokens = self._sessions.tokens(name, 0, session.kv_tokens)
        return self._keys_after(self._keys.root(session.salt), tokens)[0]

    def hold(self, name: str) -> None:
        """Pin the blocks the session has KV in, as it is now; again after `set_kv`."""
        session = self._sessions.get(name)
        former = self._held.pop(name, None)
        if session.kv_fingerprint == self._fingerprint and session.kv_tokens and not session.lost:
            chain = self._sessions.chain(name)[: session.kv_tokens // CHUNK_TOKENS]
            rest = self._sessions.tokens(name, CHUNK_TOKENS * len(chain), session.kv_tokens)
            tip = self._hold_chain(session.salt, name, chain)
            last, before = self._state_after(session.salt, tip)
            own, _, _ = self._keys_after(last, np.concatenate([before, rest]))
            self._disk.pin(own)
            self._held[name] = session.salt, tip, own
        if former is not None:
            self._let_go(*former)

    def hold_all(self) -> None:
        """Pin the blocks of every session, as when the stores have just been opened."""
        after: int | None = 0
        while after is not None:
            page = self._sessions.page(after, 1000)
            for session in page.sessions:
                self.hold(session.name)
            after = page.after

    def release(self, name: str) -> None:
        """The session is gone, or its KV is: its blocks are anonymous, but for those that others hold."""
        former = self._held.pop(name, None)
        if former is not None:
            self._let_go(*former)

    def held_keys(self, name: str) -> list[bytes]:
        """The same as `keys_of`, of what is held: nothing is read or computed."""
        salt, tip, own = self._held.get(name, ("", 0, []))
        parts = [own]
        while tip:
            chunk = self._chunks[salt, tip]
            parts.append(chunk.keys)
            tip = chunk.parent
        return [key for part in reversed(parts) for key in part]

    def last_keys(self) -> Iterator[tuple[str, bytes]]:
        """Sessions whose blocks are held, the latest first, each with the key of its last block."""
        for name, (salt, tip, own) in reversed(self._held.items()):
            if own:
                yield name, own[-1]
            elif tip:
                yield name, self._chunks[salt, tip].last

    def _hold_chain(self, salt: str, name: str, chain: list[int]) -> int:
        """Hold the last chunk of a chain, and through it all before; returns its number, 0 for none."""
        known = len(chain)
        while known and (salt, chain[known - 1]) not in self._chunks:
            known -= 1
        for i in range(known, len(chain)):
            parent = chain[i - 1] if i else 0
            last, before = self._state_after(salt, parent)
            tokens = self._sessions.tokens(name, CHUNK_TOKENS * i, CHUNK_TOKENS * (i + 1))
            keys, last, rest = self._keys_after(last, np.concatenate([before, tokens]), partial=False)
            self._disk.pin(keys)
            self._chunks[salt, chain[i]] = _Chunk(parent, keys, last, rest)
            if parent:
                self._chunks[salt, parent].refs += 1
        if not chain:
            return 0
        self._chunks[salt, chain[-1]].refs += 1
        return chain[-1]

    def _let_go(self, salt: str, tip: int, own: list[bytes]) -> None:
        self._disk.unpin(own)
        while tip:
            chunk = self._chunks[salt, tip]
            chunk.refs -= 1
            if chunk.refs:
                return
            del self._chunks[salt, tip]
            self._disk.unpin(chunk.keys)
            tip = chunk.parent

    def _state_after(self, salt: str, tip: int) -> tuple[bytes, np.ndarray]:
        if not tip:
            return self._keys.root(salt), np.empty(0, np.int32)
        chunk = self._chunks[salt, tip]
        return chunk.last, chunk.rest

    def _keys_after(
        self, last: bytes, tokens: np.ndarray, partial: bool = True
    ) -> tuple[list[bytes], bytes, np.ndarray]:
        """Keys of the blocks that hold `tokens` after the block `last`; the last full one; and what is left over."""
        keys = self._keys.after(last, tokens)
        last = keys[-1] if keys else last
        rest = tokens[len(keys) * self._keys.block_size :]
        if partial and len(rest):
            keys.append(self._keys.following(last, rest))
        return keys, last, rest
