"""Which adapter is in which slot of the device: a cache over host memory and disk. Knows numbers, not tensors.

A request *holds* the slot of its adapters from the moment it has one until it ends, so that a slot is never taken from
under a request that waits for a row. Slots that no request holds keep their content until another needs the place.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ValidationError
from quire.messages.adapter_use import AdapterUse, adapter_identity
from quire.messages.plan import AdapterLoad, AdapterLoaded
from quire.messages.request import NewRequest

PATIENCE_SECONDS = 1.0
"""A request that has waited for a slot for so long lets no later one pass whose adapter is loaded."""
EMPTY, LOADING, READY = "empty", "loading", "ready"


@dataclass
class AdapterSlot:
    number: int
    key: bytes = b""
    state: str = EMPTY
    uses: tuple[AdapterUse, ...] = ()
    holders: int = 0
    used: int = 0
    """Rises with every use: the least is evicted first…"""
    is_pinned: bool = False
    """…but pinned ones after all others."""


@dataclass
class SlotStats:
    """Counts since the start."""

    loads: int = 0
    evictions: int = 0
    failures: int = 0
    load_seconds: float = 0.0


class NoAdapters:
    """The engine has no adapters: the methods of `AdapterSlots`, doing nothing."""

    is_on = is_loading = False
    num_waiting = num_slots = 0
    stats = SlotStats()

    def hold(self, source: NewRequest) -> bool:
        if source.adapters:
            raise ValidationError(
                "the request names an adapter, and this engine serves none: set enable_lora", "lora_request"
            )
        return True

    def slot_of(self, source: NewRequest) -> int:
        return -1

    def release(self, request_id: str) -> None: ...

    def take_ready(self) -> list[str]:
        return []

    def take_loads(self) -> list[AdapterLoad]:
        return []

    def collect(self, done: list[AdapterLoaded]) -> list[tuple[str, str]]:
        return []

    def reset(self) -> None: ...

    def loaded(self) -> list[tuple[str, ...]]:
        return []

    def active(self) -> tuple[list[str], list[str]]:
        return [], []

    def explain(self, request_id: str) -> str:
        return ""

    def check_idle(self) -> None: ...


class AdapterSlots:
    """Gives slots to requests that name adapters, least recently used first, and says what is to be loaded."""

    is_on = True

    def __init__(self, num_slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = SlotStats()
        self._clock = clock
        self._slots = [AdapterSlot(number) for number in range(num_slots)]
        self._of_key: dict[bytes, AdapterSlot] = {}
        self._holding: dict[str, AdapterSlot] = {}
        """Request → the slot it holds, which may still be loading."""
        self._waiting: OrderedDict[str, tuple[NewRequest, float]] = OrderedDict()
        """Requests without a slot, and since when, in order of arrival."""
        self._unsent: list[AdapterSlot] = []
        """Slots whose load is in no plan yet."""
        self._started: dict[int, float] = {}
        self._ready: list[str] = []
        """Requests whose adapters were loaded since the last `take_ready`."""
        self._uses = 0

    # Requests

    def hold(self, source: NewRequest) -> bool:
        """The request needs its adapters: returns whether they are loaded; if not, `take_ready` names it later."""
        if not source.adapters or not source.kv_identity:
            return True  # none, or they never act on it
        if (held := self._holding.get(source.id)) is not None:
            return held.state == READY
        if source.id not in self._waiting:
            self._waiting[source.id] = (source, self._clock())
            self._assign()
        held = self._holding.get(source.id)
        if held is None or held.state != READY:
            return False
        self._ready.remove(source.id)
        return True

    def slot_of(self, source: NewRequest) -> int:
        """The slot of a request's adapters; -1: it has none."""
        held = self._holding.get(source.id)
        if held is None:
            return -1
        self._touch(held)
        return held.number

    def release(self, request_id: str) -> None:
        """The request has ended."""
        self._waiting.pop(request_id, None)
        if (held := self._holding.pop(request_id, None)) is not None:
            held.holders -= 1
        if self._waiting:
            self._assign()

    def take_ready(self) -> list[str]:
        """Requests whose adapters have been loaded since the last call."""
        ready, self._ready = self._ready, []
        return ready

    # Loading

    def _assign(self) -> None:
        """Give slots to requests that wait, in order."""
        is_blocked = False
        for request_id, (source, since) in list(self._waiting.items()):
            key = adapter_identity(source.adapters)
            slot = self._of_key.get(key)
            if is_blocked and slot is None:
                continue
            if slot is None and (slot := self._evictable()) is not None:
                self._begin(slot, key, tuple(source.adapters))
            if slot is None:
                if self._clock() - since > PATIENCE_SECONDS:
                    return
                is_blocked = True
                continue
            del self._waiting[request_id]
            slot.holders += 1
            slot.is_pinned = any(use.pinned for use in source.adapters)
            self._touch(slot)
            self._holding[request_id] = slot
            if slot.state == READY:
                self._ready.append(request_id)

    def _evictable(self) -> AdapterSlot | None:
        """An empty slot, or the least recently used one that no request holds; pinned ones if there is no other."""
        free = [slot for slot in self._slots if not slot.holders and slot.state != LOADING]
        return min(free, key=lambda slot: (slot.state == READY, slot.is_pinned, slot.used), default=None)

    def _begin(self, slot: AdapterSlot, key: bytes, uses: tuple[AdapterUse, ...]) -> None:
        if slot.state == READY:
            del self._of_key[slot.key]
            self.stats.evictions += 1
        slot.key, slot.uses, slot.state = key, uses, LOADING
        self._of_key[key] = slot
        self._unsent.append(slot)

    def _touch(self, slot: AdapterSlot) -> None:
        self._uses += 1
        slot.used = self._uses

    @property
    def is_loading(self) -> bool:
        """Whether loads are to be sent, or to be reported."""
        return bool(self._unsent or self._started)

    def take_loads(self) -> list[AdapterLoad]:
        """What the next plan is to load."""
        unsent, self._unsent = self._unsent, []
        now = self._clock()
        for slot in unsent:
            self._started[slot.number] = now
        return [AdapterLoad(slot.number, slot.key, list(slot.uses)) for slot in unsent]

    def collect(self, done: list[AdapterLoaded]) -> list[tuple[str, str]]:
        """Loads have ended; returns (request, error) of those that wait for one that failed."""
        failed: list[tuple[str, str]] = []
        for load in done:
            slot = self._slots[load.slot]
            if slot.state != LOADING or slot.key != load.key:
                continue
            self.stats.load_seconds += self._clock() - self._started.pop(slot.number, self._clock())
            held = [request_id for request_id, other in self._holding.items() if other is slot]
            if load.error:
                self.stats.failures += 1
                del self._of_key[slot.key]
                slot.state, slot.key, slot.uses = EMPTY, b"", ()
                failed += [(request_id, load.error) for request_id in held]
            else:
                self.stats.loads += 1
                slot.state = READY
                self._ready += held
        if done and self._waiting:
            self._assign()
        return failed

    def reset(self) -> None:
        """A step failed: loads that were not reported are sent again (a rank that has done one says so at once)."""
        loading = [slot for slot in self._slots if slot.state == LOADING]
        self._unsent, self._started = loading, {}

    # Looking

    @property
    def num_slots(self) -> int:
        """Adapters, or sets of them, that fit on the device."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Requests whose adapters are not loaded."""
        return len(self._waiting) + sum(slot.state != READY for slot in self._holding.values())

    def is_waiting(self, request_id: str) -> bool:
        held = self._holding.get(request_id)
        return request_id in self._waiting or (held is not None and held.state != READY)

    def explain(self, request_id: str) -> str:
        """Why the request waits."""
        if request_id in self._waiting:
            slots = len(self._slots)
            held = "the only adapter slot is" if slots == 1 else f"all {slots} adapter slots are"
            return f"{held} held by requests before it (max_loras)"
        return "its adapter is being loaded"

    def loaded(self) -> list[tuple[str, ...]]:
        """Names of the adapters in each slot that is ready."""
        return [tuple(use.name for use in slot.uses) for slot in self._slots if slot.state == READY]

    def active(self) -> tuple[list[str], list[str]]:
        """Names of adapters that requests hold, and of those that requests wait for."""
        held = {use.name for slot in self._holding.values() for use in slot.uses if slot.state == READY}
        waiting = {use.name for source, _ in self._waiting.values() for use in source.adapters}
        waiting |= {use.name for slot in self._holding.values() for use in slot.uses if slot.state != READY}
        return sorted(held), sorted(waiting)

    def check_idle(self) -> None:
        """Raise unless every slot was given back."""
        held = [slot.number for slot in self._slots if slot.holders]
        if held or self._holding or self._waiting:
            raise RuntimeError(
                f"not idle: slots {held} are held by {list(self._holding)}, {list(self._waiting)} wait for one"
            )
