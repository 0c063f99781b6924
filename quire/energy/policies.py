"""Energy policies: how long a step may be held back so that more requests share it. A registry; dotted paths too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.registry import resolve

POLICIES = {
    "balanced": "quire.energy.policies.Balanced",
    "performance": "quire.energy.policies.Performance",
    "saver": "quire.energy.policies.Saver",
}


@dataclass(frozen=True)
class Load:
    """What an engine has to do when a step could begin. Times are in seconds."""

    running: int
    """Requests in the batch."""
    waiting: int
    """Requests that wait for their first step, and…"""
    waited: float
    """…how long the first of them has."""
    step_seconds: float
    """How long a step takes at present."""
    arrival_gap: float
    """Between two requests, on average; infinity before the second."""
    request_steps: float
    """Steps of a request, on average."""
    max_rows: int
    """Most requests of a step."""


class EnergyPolicy(Protocol):
    """Chooses between latency and joules a token."""

    name: str
    saves: bool
    """Whether clocks may be lowered, where that was allowed."""

    def gather_seconds(self, load: Load) -> float:
        """How long the first waiting request may wait for others to share its steps. 0: it starts at once."""
        ...

    def step_interval(self, load: Load) -> float:
        """Least time from the beginning of a step to that of the next. Longer steps let requests that arrive join those
        that run: fewer steps for the same tokens."""
        ...


class Performance:
    """No step waits."""

    name, saves = "performance", False

    def gather_seconds(self, load: Load) -> float:
        return 0.0

    def step_interval(self, load: Load) -> float:
        return 0.0


class _Waits:
    """Waits if another request is expected soon enough to share steps; not for a lone user."""

    name = ""
    saves = False
    most_gather = 0.0
    """Seconds that a first token may come later."""
    interval = 0.0
    """Seconds between tokens of a stream up to which steps are stretched."""
    enough_rows = 0
    """Requests in a step from which on more of them save little."""

    def gather_seconds(self, load: Load) -> float:
        if load.running or load.waiting >= self.enough_rows or load.arrival_gap > self.most_gather:
            return 0.0
        return self.most_gather

    def step_interval(self, load: Load) -> float:
        if load.running + load.waiting >= min(self.enough_rows, load.max_rows):
            return 0.0
        # Requests overlap if the next arrives while those that run are there.
        lifetime = load.request_steps * max(self.interval, load.step_seconds)
        return self.interval if load.arrival_gap < lifetime else 0.0


class Balanced(_Waits):
    """First tokens at most 20 ms later, streams of few requests at 40 tokens a second."""

    name = "balanced"
    most_gather = 0.02
    interval = 0.025
    enough_rows = 4


class Saver(_Waits):
    """First tokens at most 0.2 s later, streams of few requests at 15 tokens a second."""

    name, saves = "saver", True
    most_gather = 0.2
    interval = 1 / 15
    enough_rows = 16


def make_energy_policy(name: str) -> EnergyPolicy:
    """A policy by its name or its dotted path."""
    policy: EnergyPolicy = resolve("energy policy", name, POLICIES)()
    return policy
