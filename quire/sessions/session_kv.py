"""Where the KV of sessions is: on the device between turns, or put by in the tiers below. Best effort, always."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.errors import StoreError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.offload.transfers import Save
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.request import Request
from quire.sessions.log import SessionStore
from quire.sessions.pinned_blocks import PinnedBlocks

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Live:
    """What a session holds on the device."""

    name: str
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    keys: list[bytes] = field(default_factory=list)
    """Content keys of its full blocks."""
    tokens: int = 0
    """Leading tokens with KV in those blocks."""
    turn: str = ""
    """The request that is its turn now."""
    sleeps: bool = False
    """It is to fall asleep when the turn ends."""
    since: float = 0.0


class SessionKV:
    """Blocks of all sessions of an engine."""

    def __init__(
        self,
        tables: BlockTables,
        keys: ContentKeys,
        store: SessionStore,
        fingerprint: bytes,
        tiers: OffloadManager | None = None,
        disk_blocks: PinnedBlocks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fingerprint`: of the model and the KV's layout. `disk_blocks`: what sessions own in the disk tier, if there
        is one."""
        self.fingerprint = fingerprint
        self._tables = tables
        self._keys = keys
        self._store = store
        self._tiers = tiers
        self._disk_blocks = disk_blocks
        self._clock = clock
        self._live: OrderedDict[str, Live] = OrderedDict()
        """Least recently used first."""
        self._leaving: dict[str, Save] = {}
        self._owned: dict[str, list[bytes]] = {}
        """Blocks that sleeping sessions own in host memory, where there is no disk to own them."""
        self.slept = 0
        """Times a session fell asleep…"""
        self.dropped = 0
        """…or lost its blocks to a shortage."""

    # Who is there

    def get(self, name: str) -> Live | None:
        """What the session holds on the device; None if it sleeps."""
        return self._live.get(name)

    def on_device(self) -> list[Live]:
        """Sessions with a turn, or with blocks on the device, least recently used first."""
        return list(self._live.values())

    @property
    def num_live(self) -> int:
        """…and how many they are."""
        return len(self._live)

    def held(self) -> Counter[int]:
        """How often sessions hold each block."""
        return Counter(block for live in self._live.values() for block in live.blocks)

    def put_by(self, limit: int) -> tuple[list[tuple[str, bytes]], int]:
        """Up to `limit` sleeping sessions that had blocks when they fell asleep, the latest first, each with the key of
        its last one; and how many more there are."""
        last: Iterable[tuple[str, bytes]]
        if self._disk_blocks is not None:
            last = self._disk_blocks.last_keys()
        else:
            last = ((name, keys[-1]) for name, keys in reversed(self._owned.items()) if keys)
        asleep = ((name, key) for name, key in last if name not in self._live)
        return list(itertools.islice(asleep, limit)), sum(1 for _ in asleep)

    def known_keys(self, name: str, tokens: int) -> list[bytes]:
        """Keys of the full blocks with KV of the session's first `tokens` tokens, as far as they are at hand.

        What is owned in host memory alone may be of an earlier state of the session: nothing is known then.
        """
        held = [] if self._disk_blocks is None else self._disk_blocks.held_keys(name)
        return held[: tokens // self._tables.block_size]

    # A turn

    def begin(self, name: str, turn: str) -> None:
        """The request `turn` is the session's."""
        live = self._live.setdefault(name, Live(name))
        self._live.move_to_end(name)
        live.turn, live.sleeps = turn, False

    def tokens_for(self, request: Request) -> int:
        """How many of the request's tokens its session holds on the device."""
        live = self._live.get(request.source.session) if request.source.session else None
        if live is None or not live.blocks or not request.source.reads_cache:
            return 0
        return min(live.tokens, request.known - 1)

    def cost_of_taking(self, request: Request) -> int:
        """Free blocks it takes to hold the request's known tokens, once it has taken its session's blocks."""
        blocks, refs = self._live[request.source.session].blocks, self._tables.pool.refs
        tokens = self.tokens_for(request)
        count = self._tables.blocks_for(tokens)
        is_copied = tokens % self._tables.block_size > 0 and refs[blocks[count - 1]] > 1
        given_back = sum(refs[block] == 1 for block in blocks[count:])
        return self._tables.blocks_for(request.known) - count + is_copied - given_back

    def take(self, request: Request) -> None:
        """The session's blocks become the request's."""
        live = self._live[request.source.session]
        size, tokens = self._tables.block_size, self.tokens_for(request)
        count = self._tables.blocks_for(tokens)
        self._tables.pool.release(live.blocks[count:])
        request.blocks.extend(live.blocks[:count])
        request.published = min(live.published, tokens // size)
        live.blocks, live.tokens, live.published = [], 0, 0

    def keep(self, request: Request, tokens: int) -> None:
        """The turn is over: the request's blocks with its first `tokens` tokens stay with the session."""
        live = self._live.get(request.source.session)
        if live is None:
            return
        size = self._tables.block_size
        count = self._tables.blocks_for(tokens)
        self._release(live)  # what the turn made no use of
        self._tables.pool.release(request.blocks[count:])
        live.blocks, live.tokens = request.blocks[:count], tokens
        live.published = min(request.published, tokens // size)
        live.keys = request.keys[: tokens // size]
        request.blocks.clear()
        request.published = 0

    def end(self, name: str, is_sound: bool) -> None:
        """The turn has ended; `is_sound`: what is kept is what the session says."""
        live = self._live.get(name)
        if live is None:
            return
        if not is_sound:
            self._release(live)
        live.turn, live.since = "", self._clock()
        if not live.blocks:
            del self._live[name]
        elif live.sleeps:
            self._put_to_sleep(live)

    # Sessions that change

    def fork(self, name: str, new_name: str, tokens: int) -> None:
        """A new session has the first `tokens` tokens of another, and shares every block it can."""
        if (live := self._live.get(name)) is not None and live.blocks:
            child = Live(new_name, since=self._clock(), keys=list(live.keys))
            child.tokens = min(live.tokens, tokens)
            self._tables.adopt(child, live.blocks[: self._tables.blocks_for(child.tokens)])
            child.published = min(live.published, child.tokens // self._tables.block_size)
            self._live[new_name] = child
        if self._disk_blocks is not None:
            self._disk_blocks.hold(new_name)
        elif name in self._owned and self._tiers is not None:
            self._owned[new_name] = list(self._owned[name])
            self._tiers.host.pin(self._owned[new_name])

    def cut(self, name: str, tokens: int) -> None:
        """The session's tokens from `tokens` on are others now."""
        live = self._live.get(name)
        if live is not None and tokens < live.tokens:
            # To a whole block: one that others may find must not be written to.
            live.tokens = tokens - tokens % self._tables.block_size
            count = live.tokens // self._tables.block_size
            self._tables.pool.release(live.blocks[count:])
            del live.blocks[count:], live.keys[count:]
            live.published = min(live.published, count)
        if self._disk_blocks is not None:
            self._disk_blocks.hold(name)

    def forget(self, name: str) -> None:
        """The session is no more."""
        live = self._live.get(name)
        if live is not None:
            self._release(live)
            if not live.turn:
                del self._live[name]
        self._leaving.pop(name, None)
        if self._disk_blocks is not None:
            self._disk_blocks.release(name)
        if name in self._owned and self._tiers is not None:
            self._tiers.host.unpin(self._owned.pop(name))

    # Falling asleep

    def suspend(self, name: str) -> None:
        """The session gives its device blocks up, now or when its turn ends; copies take steps (`is_settled`)."""
        if (live := self._live.get(name)) is not None:
            if live.turn:
                live.sleeps = True
            else:
                self._put_to_sleep(live)

    def is_settled(self, name: str) -> bool:
        """Whether all there was to save of a suspended session is saved."""
        return name not in self._leaving or self._leaving[name].is_done

    def sleep_idle(self, seconds: float | None) -> None:
        """Sessions that have had no turn for so long fall asleep. To be called from time to time, if only with None."""
        self._leaving = {name: save for name, save in self._leaving.items() if not save.is_done}
        if seconds is not None:
            now = self._clock()
            for live in self.on_device():
                if not live.turn and now - live.since >= seconds:
                    self._put_to_sleep(live)

    def sleep_one(self) -> bool:
        """The session that has been idle longest falls asleep; False if none is idle."""
        live = next((live for live in self._live.values() if not live.turn), None)
        if live is not None:
            self._put_to_sleep(live)
        return live is not None

    def reclaim(self, count: int, but: str = "") -> int:
        """Give up to `count` blocks back now, of sessions idle longest, `but` for one; returns how many they let go of,
        those too that others hold.

        There is no time to save them: what others could find of them stays where it is until it is evicted.
        """
        pool = self._tables.pool
        before, given = pool.free, 0
        for live in self.on_device():
            if pool.free - before >= count:
                break
            if not live.blocks or live.name == but:
                continue
            given += len(live.blocks)
            self._note(live)
            self._release(live)
            self.dropped += 1
            if not live.turn:  # one whose turn waits for a row is waited for itself
                del self._live[live.name]
        return given

    def forget_device(self) -> None:
        """The device's memory is not to be trusted any more."""
        for live in self.on_device():
            self._release(live)
            if not live.turn:
                del self._live[live.name]

    def _put_to_sleep(self, live: Live) -> None:
        self.slept += 1
        self._note(live)
        if self._tiers is not None:
            pairs = list(zip(live.keys, live.blocks, strict=False))
            if live.tokens % self._tables.block_size:
                pairs.append((self._partial_key(live), live.blocks[-1]))
            if self._disk_blocks is None:
                self._own(live.name, [key for key, _ in pairs])
            self._leaving[live.name] = self._tiers.save(pairs, to_disk=True)
        self._release(live)
        del self._live[live.name]

    def _note(self, live: Live) -> None:
        """Write down how far the session's KV goes, so that whoever wakes it knows what to look for."""
        try:
            self._store.set_kv(live.name, live.tokens, self.fingerprint)
            if self._disk_blocks is not None:
                self._disk_blocks.hold(live.name)
        except (StoreError, KeyError) as error:
            logger.warning("the KV of session %r will be computed again: %s", live.name, error)

    def _own(self, name: str, keys: list[bytes]) -> None:
        assert self._tiers is not None
        before = self._owned.pop(name, [])
        self._tiers.host.pin(keys)
        self._tiers.host.unpin(before)
        self._owned[name] = keys

    def _partial_key(self, live: Live) -> bytes:
        size = self._tables.block_size
        full = live.tokens // size
        session = self._store.get(live.name)
        parent = live.keys[full - 1] if full else self._keys.root(session.salt)
        return self._keys.following(parent, self._store.tokens(live.name, full * size, live.tokens))

    def _release(self, live: Live) -> None:
        self._tables.pool.release(live.blocks)
        live.blocks, live.tokens, live.published = [], 0, 0
