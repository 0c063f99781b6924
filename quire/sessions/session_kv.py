"""The KV of sessions: on the device between turns, or offloaded to the tiers below. What is lost is computed again."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from blake3 import blake3

from quire.errors import StoreError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.groups import GroupTable
from quire.kvcache.offload.manager import OffloadManager
from quire.kvcache.offload.page_keys import pages_to_continue
from quire.kvcache.offload.transfers import SaveTransfer
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.adapter_use import identity_start
from quire.messages.request import Request
from quire.sessions.log import SessionStore
from quire.sessions.pinned_blocks import PinnedBlocks

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ResidentSession:
    """A session with a running turn, or with blocks on the device."""

    name: str
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    tables: list[GroupTable] = field(default_factory=list)
    """Its tables in other cache groups. The state there is that after exactly `tokens` tokens."""
    keys: list[bytes] = field(default_factory=list)
    """Content keys of its full blocks."""
    tokens: int = 0
    """Leading tokens with KV in those blocks."""
    identity: bytes = b""
    """`NewRequest.kv_identity` of the turn that computed them: a turn with other adapters cannot use them."""
    turn: str = ""
    """Id of the request that is its running turn; empty: none."""
    suspend_after_turn: bool = False
    idle_since: float = 0.0


class SessionKV:
    """Blocks of all sessions of an engine."""

    def __init__(
        self,
        tables: BlockTables,
        keys: ContentKeys,
        store: SessionStore,
        fingerprint: bytes,
        tiers: OffloadManager | None = None,
        pinned: PinnedBlocks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fingerprint`: of the model and the KV's layout. `pinned`: pins in the disk tier, if there is one."""
        self.fingerprint = fingerprint
        self._tables = tables
        self._keys = keys
        self._store = store
        self._tiers = tiers
        self._pinned = pinned
        self._clock = clock
        self._resident: OrderedDict[str, ResidentSession] = OrderedDict()
        """Least recently used first."""
        self._saves: dict[str, SaveTransfer] = {}
        self._host_pins: dict[str, list[bytes]] = {}
        """Blocks of suspended sessions that are pinned in host memory, if there is no disk tier."""
        self.suspended = 0
        """Times a session was suspended…"""
        self.dropped = 0
        """…or lost its device blocks to a shortage."""

    # Lookup

    def get(self, name: str) -> ResidentSession | None:
        """What the session has on the device; None if it is suspended."""
        return self._resident.get(name)

    def on_device(self) -> list[ResidentSession]:
        """Sessions with a running turn or with blocks on the device, least recently used first."""
        return list(self._resident.values())

    @property
    def num_on_device(self) -> int:
        """Sessions with a running turn or with blocks on the device."""
        return len(self._resident)

    def block_refs(self) -> Counter[int]:
        """How many references sessions have to each device block."""
        return Counter(block for resident in self._resident.values() for block in self._tables.every_page(resident))

    def offloaded(self, limit: int) -> tuple[list[tuple[str, bytes]], int]:
        """Up to `limit` suspended sessions that had blocks, the latest first, each with the key of its last block; and
        how many more there are."""
        last: Iterable[tuple[str, bytes]]
        if self._pinned is not None:
            last = self._pinned.last_keys()
        else:
            last = ((name, keys[-1]) for name, keys in reversed(self._host_pins.items()) if keys)
        suspended = ((name, key) for name, key in last if name not in self._resident)
        return list(itertools.islice(suspended, limit)), sum(1 for _ in suspended)

    def offloaded_pages(self, name: str) -> list[bytes]:
        """Keys of a suspended session's blocks in lower tiers."""
        return self._host_pins.get(name, []) if self._pinned is None else self._pinned.pages_of(name)

    def known_keys(self, name: str, tokens: int) -> list[bytes]:
        """Keys of the full blocks with KV of the session's first `tokens` tokens, as far as they need no computing.

        Without a disk tier none: the pins in host memory may be of an earlier state of the session.
        """
        keys = [] if self._pinned is None else self._pinned.keys_of(name)
        return keys[: tokens // self._tables.block_size]

    # A turn

    def begin(self, name: str, turn: str) -> None:
        """Start a turn of the session: the request with the id `turn`."""
        resident = self._resident.setdefault(name, ResidentSession(name))
        self._resident.move_to_end(name)
        resident.turn, resident.suspend_after_turn = turn, False

    def tokens_for(self, request: Request) -> int:
        """How many of the request's tokens have KV in its session's device blocks."""
        resident = self._resident.get(request.source.session) if request.source.session else None
        if resident is None or not resident.blocks or not request.source.reads_cache:
            return 0
        if resident.identity != request.kv_identity:
            return 0
        tokens = min(resident.tokens, request.known - 1)
        return tokens if self._tables.can_continue(resident, resident.tokens, tokens) else 0

    def cost_of_taking(self, request: Request) -> int:
        """Free blocks the request's known tokens need in addition to its session's blocks."""
        if self._tables.others:
            return self._tables.cost_of_continuing(
                self._resident[request.source.session], self.tokens_for(request), request.known
            )
        blocks, refs = self._resident[request.source.session].blocks, self._tables.pool.refs
        tokens = self.tokens_for(request)
        count = self._tables.blocks_for(tokens)
        is_copied = tokens % self._tables.block_size > 0 and refs[blocks[count - 1]] > 1
        given_back = sum(refs[block] == 1 for block in blocks[count:])
        return self._tables.blocks_for(request.known) - count + is_copied - given_back

    def take(self, request: Request) -> None:
        """Move the session's blocks to the request."""
        resident = self._resident[request.source.session]
        self._tables.hand_over(resident, request, self.tokens_for(request))
        resident.tokens = 0

    def keep(self, request: Request, tokens: int, state_at: int) -> None:
        """The turn is over: move the request's blocks with its first `tokens` tokens to the session. `state_at`: how
        many tokens its recurrent state has consumed; if these are others, the next turn starts from a snapshot."""
        resident = self._resident.get(request.source.session)
        if resident is None:
            return
        self._release(resident)  # blocks the turn did not take
        if not tokens or not self._tables.can_continue(request, state_at, tokens):
            return
        self._tables.hand_over(request, resident, tokens)
        resident.tokens = tokens
        resident.identity = request.kv_identity
        resident.keys = request.keys[: tokens // self._tables.block_size]

    def end(self, name: str, is_stored: bool) -> None:
        """The turn has ended; `is_stored`: its output is in the session's log, so its KV can be used."""
        resident = self._resident.get(name)
        if resident is None:
            return
        if not is_stored:
            self._release(resident)
        resident.turn, resident.idle_since = "", self._clock()
        if not resident.blocks:
            del self._resident[name]
        elif resident.suspend_after_turn:
            self._suspend(resident)

    # Changes of a session

    def fork(self, name: str, new_name: str, tokens: int) -> None:
        """Give a fork with the first `tokens` tokens of a session the blocks of those tokens."""
        if (resident := self._resident.get(name)) is not None and resident.blocks:
            child = ResidentSession(new_name, idle_since=self._clock(), keys=list(resident.keys))
            child.identity = resident.identity
            child.tokens = min(resident.tokens, tokens)
            if self._tables.can_continue(resident, resident.tokens, child.tokens):
                self._tables.share(resident, child, child.tokens)
            else:
                self._adopt_cached(child, child.tokens)
            if child.blocks:
                self._resident[new_name] = child
        if self._pinned is not None:
            self._pinned.pin(new_name)
        elif name in self._host_pins and self._tiers is not None:
            self._host_pins[new_name] = list(self._host_pins[name])
            self._tiers.host.pin(self._host_pins[new_name])

    def cut(self, name: str, tokens: int) -> None:
        """The session was cut to its first `tokens` tokens: release blocks after them."""
        resident = self._resident.get(name)
        if resident is not None and tokens < resident.tokens:
            # To a whole block: a block in the prefix cache must not be written to.
            kept = tokens - tokens % self._tables.block_size
            count = kept // self._tables.block_size
            if self._tables.can_continue(resident, resident.tokens, kept):
                self._tables.shorten(resident, kept)
                resident.tokens = kept
            else:
                self._release(resident)
                self._adopt_cached(resident, kept)
            del resident.keys[count:]
        if self._pinned is not None:
            self._pinned.pin(name)

    def _adopt_cached(self, resident: ResidentSession, most: int) -> None:
        """Give the session what the prefix cache has of its first `most` tokens: a window has moved on from there, or a
        state has consumed more."""
        hit = self._tables.find(resident.keys, most + 1)
        self._tables.adopt(resident, hit)
        resident.tokens = len(hit.blocks) * self._tables.block_size

    def forget(self, name: str) -> None:
        """The session was deleted."""
        resident = self._resident.get(name)
        if resident is not None:
            self._release(resident)
            if not resident.turn:
                del self._resident[name]
        self._saves.pop(name, None)
        if self._pinned is not None:
            self._pinned.unpin(name)
        if name in self._host_pins and self._tiers is not None:
            self._tiers.host.unpin(self._host_pins.pop(name))

    # Suspending

    def suspend(self, name: str) -> None:
        """Offload the session's device blocks, now or when its turn ends. Copies take several steps: see `is_saved`."""
        if (resident := self._resident.get(name)) is not None:
            if resident.turn:
                resident.suspend_after_turn = True
            else:
                self._suspend(resident)

    def is_saved(self, name: str) -> bool:
        """Whether all blocks of a suspended session are saved."""
        return name not in self._saves or self._saves[name].is_done

    def suspend_idle(self, seconds: float | None) -> None:
        """Suspend sessions idle for `seconds` (None: none), and forget finished saves. Called periodically."""
        self._saves = {name: save for name, save in self._saves.items() if not save.is_done}
        if seconds is not None:
            now = self._clock()
            for resident in self.on_device():
                if not resident.turn and now - resident.idle_since >= seconds:
                    self._suspend(resident)

    def suspend_oldest(self) -> bool:
        """Suspend the session that has been idle longest; False if none is idle."""
        resident = next((resident for resident in self._resident.values() if not resident.turn), None)
        if resident is not None:
            self._suspend(resident)
        return resident is not None

    def reclaim(self, count: int, but: str = "") -> int:
        """Release blocks of the sessions idle longest, except the one named `but`, until `count` more blocks are free.
        Returns how many references were released.

        There is no time to save the blocks; those in the prefix cache stay there until they are evicted.
        """
        pool = self._tables.pool
        before, released = pool.free, 0
        for resident in self.on_device():
            if pool.free - before >= count:
                break
            if not resident.blocks or resident.name == but:
                continue
            released += len(resident.blocks)
            self._record_kv(resident)
            self._release(resident)
            self.dropped += 1
            if not resident.turn:  # a turn that waits for a row keeps its session resident
                del self._resident[resident.name]
        return released

    def forget_device(self) -> None:
        """Release all device blocks: their content may be wrong."""
        for resident in self.on_device():
            self._release(resident)
            if not resident.turn:
                del self._resident[resident.name]

    def pin_loaded(self, limit: int) -> bool:
        """Pin some stored blocks of sessions of earlier runs; returns whether there are more."""
        try:
            return self._pinned is not None and self._pinned.pin_loaded(limit)
        except StoreError as error:
            logger.warning("cannot pin the KV of a session, other blocks may evict it: %s", error)
            return True

    def _suspend(self, resident: ResidentSession) -> None:
        """Save the session's blocks to lower tiers, if there are any, and release them."""
        self.suspended += 1
        self._record_kv(resident)
        if self._tiers is not None:
            pairs = pages_to_continue(self._tables, resident, resident.keys, resident.tokens, self._end_key(resident))
            if self._pinned is None:
                self._pin_in_host(resident.name, [key for key, _ in pairs])
            self._saves[resident.name] = self._tiers.save(pairs, to_disk=True)
        self._release(resident)
        del self._resident[resident.name]

    def _record_kv(self, resident: ResidentSession) -> None:
        """Record in the session's log how many tokens have KV, so that its next turn looks for these."""
        try:
            self._store.set_kv(resident.name, resident.tokens, self.fingerprint_of(resident.identity))
            if self._pinned is not None:
                self._pinned.pin(resident.name)
        except (StoreError, KeyError) as error:
            logger.warning("cannot record the KV of session %r, it will be computed again: %s", resident.name, error)

    def fingerprint_of(self, identity: bytes) -> bytes:
        """What the session's log calls KV that was computed with these adapters. The disk tier pins KV without adapters
        only."""
        return blake3(self.fingerprint + identity).digest() if identity else self.fingerprint

    def _pin_in_host(self, name: str, keys: list[bytes]) -> None:
        assert self._tiers is not None
        before = self._host_pins.pop(name, [])
        self._tiers.host.pin(keys)
        self._tiers.host.unpin(before)
        self._host_pins[name] = keys

    def _end_key(self, resident: ResidentSession) -> bytes:
        """The content key of all its tokens."""
        size = self._tables.block_size
        full, is_partial = divmod(resident.tokens, size)
        if full and not is_partial:
            return resident.keys[full - 1]
        session = self._store.get(resident.name)
        parent = resident.keys[full - 1] if full else self._keys.root(session.salt)
        if resident.identity and full == identity_start(resident.identity) // size:
            parent = self._keys.adapted(parent, resident.identity)
        tokens = self._store.tokens(resident.name, full * size, resident.tokens)
        return self._keys.key_after(parent, tokens, session.key_spans, full * size)

    def _release(self, resident: ResidentSession) -> None:
        self._tables.release(resident)
        resident.tokens = 0
