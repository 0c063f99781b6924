"""The cost limits of one rendering. A thread cannot be stopped from outside, so all work is charged here first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2.exceptions import TemplateRuntimeError

T = TypeVar("T")
_LOOK_EVERY = 2048
_SMALL = 1 << 14
_MAX_BITS = 1 << 14
_REFERENCE = 16
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, type({}.keys()), type({}.values()), type({}.items()))


class OverBudgetError(TemplateRuntimeError):
    """A template exceeded its time or memory."""


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one rendering."""

    seconds: float = 1.0
    """CPU time of the rendering thread: a busy machine makes no template fail."""
    characters: int = 8 << 20
    """Size of the rendered text, and of any intermediate value."""
    total: int = 256 << 20
    """Total size of all intermediate values; freed ones still count."""
    depth: int = 128
    """Maximum nesting of lists and dicts."""
    source: int = 1 << 20
    """Characters of a template…"""
    code: int = 4 << 20
    """…and of the Python that it becomes: compiling that cannot be interrupted, and takes about 0.5 µs for each."""


class Budget:
    """What one rendering has used of its limits.

    Sizes are in characters, as if a value were written out: a list that holds one list twice is as large as two, so
    work linear in the size is bounded, however the value was built.
    """

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._ends = time.thread_time() + limits.seconds
        self._until_look = _LOOK_EVERY
        self._total = 0
        self._known: dict[int, tuple[Any, int, int]] = {}
        """Sizes and depths of containers by id; the reference keeps the id valid. Templates cannot change them."""

    def check_code(self, size: int) -> None:
        """Refuse a template that becomes Python of this many characters."""
        if size > self.limits.code:
            raise OverBudgetError(
                f"the chat template becomes a program of more than {self.limits.code} characters: it has too many tags "
                "and expressions"
            )

    def spend(self, work: int) -> None:
        """Charge for work that takes about as long as copying this many characters."""
        self._until_look -= work
        if self._until_look < 0:
            self._until_look = _LOOK_EVERY
            if time.thread_time() > self._ends:
                raise OverBudgetError(f"the chat template ran longer than its {self.limits.seconds:g} s")

    def step(self) -> None:
        """Charge for one block of a template's code."""
        self.spend(8)

    def read(self, value: T) -> T:
        """Charge for an operation that reads all of a value."""
        size = self.size(value)
        if size > self.limits.characters:
            self.room(size)
        self.spend(size if size < _SMALL else _SMALL)
        return value

    def made(self, value: T) -> T:
        """Charge for a new value."""
        size = self.size(value)
        self.room(size, _REFERENCE * len(value) if isinstance(value, _CONTAINERS) else size)  # type: ignore[arg-type]
        return value

    def room(self, size: int, memory: int | None = None) -> None:
        """Refuse a value of this size before it is made, or charge for it. A list takes less `memory` than its size."""
        if size > self.limits.characters:
            raise OverBudgetError(
                f"the chat template makes a value of {_short(size)} characters; at most {self.limits.characters}"
            )
        self._total += size if memory is None else memory
        if self._total > self.limits.total:
            raise OverBudgetError(
                f"the chat template makes more than {self.limits.total} characters of intermediate values"
            )
        self.spend(8 + (size >> 4))

    def size(self, value: Any) -> int:
        """Approximate size of a value when written out."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            if value.bit_length() > _MAX_BITS:
                raise OverBudgetError(f"the chat template makes a number of {value.bit_length()} bits")
            return 1
        if isinstance(value, _CONTAINERS):
            return self._measured(value)[0]
        return len(value) if isinstance(value, range) else 1

    def depth(self, value: Any) -> int:
        """Nesting depth of a value; 0 if it is no container."""
        return self._measured(value)[1] if isinstance(value, _CONTAINERS) else 0

    def _measured(self, value: Any, level: int = 0) -> tuple[int, int]:
        """Size and depth of a container; raises if it is nested too deeply."""
        known = self._known.get(id(value))
        if known is not None:
            return known[1], known[2]
        size, depth = 2, 0
        if level > self.limits.depth:
            raise OverBudgetError(f"a value is nested deeper than {self.limits.depth} levels")
        for items in (value.keys(), value.values()) if isinstance(value, dict) else (value,):
            for item in items:
                if isinstance(item, str):
                    size += 2 + len(item)
                elif isinstance(item, _CONTAINERS):
                    inner, below = self._measured(item, level + 1)
                    size += 2 + inner
                    depth = max(depth, below)
                else:
                    size += 2 + self.size(item)
        depth += 1
        if depth > self.limits.depth:
            raise OverBudgetError(f"a value is nested deeper than {self.limits.depth} levels")
        self.spend(8 + len(value))
        self._known[id(value)] = (value, size, depth)
        return size, depth


_current: ContextVar[Budget] = ContextVar("rendering_budget")


def budget() -> Budget:
    """The budget of the rendering that runs in this thread."""
    return _current.get()


@contextmanager
def on_budget(account: Budget) -> Iterator[Budget]:
    """All work inside is charged to this budget."""
    token = _current.set(account)
    try:
        yield account
    finally:
        _current.reset(token)


def metered(items: Any) -> Iterator[Any]:
    """The same items, each charged."""
    account = budget()
    for item in items:
        account.step()
        yield item


def _short(number: int) -> str:
    return str(number) if number < 10**15 else "over 10^15"
