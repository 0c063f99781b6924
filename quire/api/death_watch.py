"""Finds the request that kills engines, among those that were at an engine when it died."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PROGRESS_TOKENS = 8
"""A request with this many tokens since it was last sent to an engine did not kill that engine in the way it may have
killed the one before: a few tokens may come before the same step fails again."""
SUSPECT_DEATHS = 2
"""Deaths in a row, without progress in between, after which a request is retried alone."""
MOST_DEATHS = 32
"""Deaths, with progress or without, after which a request is not retried at all."""


@dataclass(slots=True)
class _Record:
    """A request that was at an engine when it died."""

    deaths: int = 0
    """In a row, without progress in between."""
    total: int = 0
    tokens: int = 0
    """Output tokens it had when it was last sent to an engine."""


class DeathWatch:
    """Requests by key. After the first death all are sent again together; those that were at a second one without
    progress in between are suspects, to be retried alone, one after the other. One that is alone at the next death has
    killed it."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self.suspects: dict[str, None] = {}
        """Requests to be retried alone, in this order."""

    def engine_died(self, tokens: Mapping[str, int], reason: str) -> dict[str, str]:
        """An engine died while these requests, with so many output tokens each, were at it. Returns those that are not
        to be retried, and why; without them the others are no suspects any more."""
        guilty: dict[str, str] = {}
        suspects: list[str] = []
        for key, count in tokens.items():
            record = self._records.setdefault(key, _Record())
            record.deaths = 1 if count - record.tokens >= PROGRESS_TOKENS else record.deaths + 1
            record.total += 1
            if record.deaths > SUSPECT_DEATHS and len(tokens) == 1:
                guilty[key] = (
                    f"the engine died {record.total} times while this request ran, the last time while no other did, "
                    f"so the request is not retried: {reason}"
                )
            elif record.total > MOST_DEATHS:
                guilty[key] = f"the engine died {record.total} times while this request ran: {reason}"
            elif record.deaths >= SUSPECT_DEATHS:
                suspects.append(key)
        self.suspects = dict.fromkeys([*suspects, *self.suspects])
        if guilty:
            for key in self.suspects:
                self._records[key].deaths = 1
            self.suspects = {}
            for key in guilty:
                self.forget(key)
        return guilty

    def sent(self, key: str, tokens: int) -> None:
        """The request, with so many output tokens, is sent to another engine."""
        self._records.setdefault(key, _Record()).tokens = tokens

    def needs_empty(self, key: str) -> bool:
        """Whether the suspect was tried beside requests that had passed: the next time it must be alone from the
        start."""
        return self._records[key].deaths > SUSPECT_DEATHS

    def begin_trial(self, key: str) -> None:
        """The suspect is sent to an engine that has no other request."""
        del self.suspects[key]

    def passes(self, key: str, tokens: int) -> bool:
        """Whether a suspect that runs alone has progressed enough to be none any more."""
        record = self._records.get(key)
        if record is None or tokens - record.tokens < PROGRESS_TOKENS:
            return record is None
        record.deaths = 0
        return True

    def keep(self, keys: Iterable[str]) -> None:
        """All requests but these have ended."""
        for key in self._records.keys() - set(keys):
            self.forget(key)

    def forget(self, key: str) -> None:
        """The request has ended."""
        self._records.pop(key, None)
        self.suspects.pop(key, None)
