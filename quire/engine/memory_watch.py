"""Watches bytes beside blocks, and sets how many tokens a step may have.

The KV cache is allocated once; what grows is the memory of steps, of libraries and of other programs. Once a second the
free bytes are measured, on the device and on its machine. Two thresholds, in shares of what the cache and the weights
leave of the device (with the largest step counted as in use), or of the machine's memory:

- 90% in use: steps are halved until the largest one fits. Memory of the machine: unused heap and idle grammars are
  given back.
- 95% in use: also, a step admits one new request.

Steps become larger again when there is room for twice as many tokens. After a step that ran out of memory in spite of
that, they wait longer each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.messages.memory_use import MemoryUse
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

FIRST_THRESHOLD = 0.90
SECOND_THRESHOLD = 0.95
"""Shares of the memory in use."""
LEAST_BUDGET = 256
"""Tokens. Steps are not made smaller than this: then a single request is the cause."""
MEASURE_SECONDS = 1.0
RAISE_SECONDS = 10.0
"""How long steps stay smaller at least…"""
LONGEST_PAUSE_SECONDS = 3600.0
"""…and at most, if they run out of memory whenever they are larger again."""
TRIM_SECONDS = 30.0
"""How often heap and grammars are given back at most."""
RETURN_SECONDS = 60.0
"""Freed heap is given back after this pause…"""
RETURN_SHARE = 10_000
"""…or, if that is longer, after this many times what giving it back took: a heap of many pieces takes long."""
SLOW_RETURN_SECONDS = 0.003
"""A heap that takes longer is given back only while the engine is idle."""


@dataclass(frozen=True)
class StepMemory:
    """What a device has for steps, in bytes. On a CPU that is not known: the machine's memory is all there is."""

    room: int = 0
    """Besides weights, cache and what was in use before; 0: not known."""
    largest_step: int = 0
    step_tokens: int = 1
    """Tokens of the largest step."""


class MemoryWatch:
    """Keeps the largest step within the memory that there is."""

    def __init__(
        self,
        scheduler: Scheduler,
        measure: Callable[[], MemoryUse | None] = lambda: None,
        steps: StepMemory = StepMemory(),
        trim: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measure`: None if it is not known. `trim`: gives back what is not needed."""
        self.device_used = self.host_used = 0.0
        """Shares in use; that of the device as if the largest step were running."""
        self.device_level = self.host_level = 0
        """Thresholds exceeded."""
        self.failed = self.lowered = self.raised = self.trimmed = 0
        """Steps that ran out of memory; how often the largest step was made smaller, and larger; trims."""
        self._scheduler = scheduler
        self._measure = measure
        self._steps = steps
        self._trim = trim
        self._clock = clock
        self._full = scheduler.budget
        self._least = min(LEAST_BUDGET, self._full)
        self._measured_at = self._trimmed_at = -math.inf
        self._changed_at = self._failed_at = -math.inf
        self._pause = RAISE_SECONDS
        self._last: MemoryUse | None = None

    def tick(self) -> None:
        """To be called once a step."""
        now = self._clock()
        if now - self._measured_at < MEASURE_SECONDS:
            return
        self.look(now)
        if self.device_level and self._scheduler.budget > self._least:
            self._set(max(self._least, self._scheduler.budget // 2), now)
            self.lowered += 1
            logger.warning(
                "%.0f%% of the memory is in use: steps have at most %d tokens now",
                100 * self.device_used, self._scheduler.budget,
            )  # fmt: skip
        elif self._scheduler.budget < self._full and now - self._changed_at >= self._pause and self._has_room():
            self._set(min(self._full, 2 * self._scheduler.budget), now)
            self.raised += 1
            logger.info("there is memory again: steps have up to %d tokens now", self._scheduler.budget)
        if self.host_level and now - self._trimmed_at >= TRIM_SECONDS:
            self._trimmed_at = now
            self.trimmed += 1
            self._trim()

    def look(self, now: float | None = None) -> None:
        """Measure how full the memory is."""
        self._measured_at = self._clock() if now is None else now
        use = self._measure()
        if use is None:
            return
        self.host_used = 1 - use.host_free / max(1, use.host_total)
        self.device_used = self._share_used(use, self._scheduler.budget)
        self.host_level, self.device_level = _level(self.host_used), _level(self.device_used)
        self._scheduler.pressure.memory = max(self.host_level, self.device_level)
        self._last = use

    def step_failed(self, tokens: int) -> int:
        """A step of so many tokens ran out of memory: make steps smaller. Returns the most tokens they have now."""
        now = self._clock()
        self.failed += 1
        if now - self._failed_at > LONGEST_PAUSE_SECONDS:
            self._pause = RAISE_SECONDS
        elif self.raised:
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._failed_at = now
        self._set(min(self._scheduler.budget, max(self._least, tokens // 2)), now)
        return self._scheduler.budget

    def _set(self, tokens: int, now: float) -> None:
        self._scheduler.budget = tokens
        self._changed_at = now

    def _has_room(self) -> bool:
        """Whether steps of twice as many tokens would be below the first threshold."""
        wanted = min(self._full, 2 * self._scheduler.budget)
        return self._last is None or not _level(self._share_used(self._last, wanted))

    def _share_used(self, use: MemoryUse, tokens: int) -> float:
        steps = self._steps
        if not steps.room:
            return 1 - use.device_free / max(1, use.device_total)
        step = steps.largest_step * tokens // max(1, steps.step_tokens)
        return max(0.0, 1 - (use.device_free - step) / max(steps.room, step))


class HeapReturns:
    """Gives freed heap back to the system once in a while. Between objects of every age there are free pieces; those
    that large passing tensors and texts have touched once stay resident otherwise, a little more for hours."""

    def __init__(
        self, give_back: Callable[[], object] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._give_back = give_back_heap if give_back is None else give_back
        self._clock = clock
        self._due = clock() + RETURN_SECONDS
        self._is_needed = self._is_slow = False

    def tick(self) -> None:
        """To be called once a step. A heap that takes long waits until the engine is idle: streams would notice."""
        self._is_needed = True
        if not self._is_slow and self._clock() >= self._due:
            self._return()

    def tick_idle(self) -> float | None:
        """To be called while idle; returns after how many seconds to call it again, None if not before a step."""
        if self._is_needed and self._clock() >= self._due:
            self._return()
        return max(0.0, self._due - self._clock()) if self._is_needed else None

    def _return(self) -> None:
        begin = self._clock()
        self._give_back()
        self._is_needed = False
        ended = self._clock()
        self._is_slow = ended - begin > SLOW_RETURN_SECONDS
        self._due = ended + max(RETURN_SECONDS, RETURN_SHARE * (ended - begin))


def _level(used: float) -> int:
    return (used >= FIRST_THRESHOLD) + (used >= SECOND_THRESHOLD)


def give_back_heap() -> None:
    """Return freed memory of this process to the system, where the C library can."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
