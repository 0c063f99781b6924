"""How busy a replica is, as seen from outside: from what was sent there and what came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HALF_LIFE_SECONDS = 20.0
"""Age at which computed tokens count half in `work`."""
INITIAL_PREFILL_SPEED = 4000.0
"""Prompt tokens a second, until something was measured."""
MIN_MEASURED_TOKENS = 256
"""Shorter prompts are not measured: the fixed cost of a step dominates their time."""
SPEED_TOLERANCE = 1.4
"""A replica within this factor of the group's speed counts as equally fast: the difference is mostly noise, and a
replica that only looks slower would get less work for no reason."""
ROW_TOKENS = 200
"""A running sequence delays a new prompt as much as this many queued prompt tokens: it has a part in every step."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRequest:
    """A request as the router sees it."""

    keys: Sequence[bytes]
    """Content keys of the prompt's full blocks. They include the tenant's salt: tenants do not match each other's."""
    prompt_tokens: int
    sequences: int = 1
    """Rows it takes once its prompt is computed."""
    tenant: str = ""
    adapters: bytes = b""
    """Identity of its LoRA adapters; empty without."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request at one replica, from launch to end. Events that arrive after its end are ignored."""

    request: RoutedRequest
    replica: str
    uncached: int
    """Prompt tokens to compute: the router's estimate until the replica reports it."""
    launched: float
    started: float | None = None
    """When its first token came."""
    generated: int = 0
    """Tokens so far, over all sequences."""
    is_over: bool = False


class Rate:
    """Amount per second, over about the last `span` measurements; the initial guess counts as a measurement of one
    second.

    Amounts and times are summed separately. Prompts computed in one step finish together, so the second of them took no
    time of its own: a mean of ratios would count that as infinite speed.
    """

    def __init__(self, guess: float, span: int) -> None:
        self._amount, self._seconds = guess, 1.0
        self._keep = 1 - 1 / span

    def note(self, amount: float, seconds: float) -> None:
        """Add a measurement."""
        self._amount = self._keep * self._amount + amount
        self._seconds = self._keep * self._seconds + seconds

    @property
    def value(self) -> float:
        return self._amount / self._seconds


class ReplicaLoad:
    """The load of one replica's open requests. Everything is zero again when they are over, except `work`, which
    decays."""

    def __init__(self, group_speed: Rate, rows: int, kv_tokens: int, prefill_speed: float) -> None:
        """`group_speed`: prompt tokens a second of a replica, measured over all of them. `rows`, `kv_tokens`: what this
        one has room for. `prefill_speed`: prompt tokens a second, a first guess."""
        self._group_speed = group_speed
        self.max_rows, self.max_kv_tokens = rows, kv_tokens
        self.queued = 0
        """Prompt tokens still to compute."""
        self.rows = 0
        """Sequences there, including those whose prompt waits."""
        self.kv_tokens = 0
        """Tokens of KV that all open requests hold, or will when their prompts are computed."""
        self.generated = 0
        """Tokens that open requests have generated."""
        self.requests: dict[OpenRequest, None] = {}
        self._own_speed = Rate(prefill_speed, span=50)
        self._waiting: dict[OpenRequest, None] = {}
        """Requests without a first token."""
        self._busy_since = 0.0
        """When the last prompt was done, or the first arrived: progress since then is unknown."""
        self._request_seconds = Rate(1.0, span=50)
        """Seconds from launch to end, per request."""
        self._work, self._work_at = 0.0, 0.0

    # Events

    def launched(self, opened: OpenRequest, now: float) -> None:
        """A request was sent there."""
        request = opened.request
        if not self._waiting:
            self._busy_since = now
        self.requests[opened] = self._waiting[opened] = None
        self.queued += opened.uncached
        self.rows += request.sequences
        self.kv_tokens += request.prompt_tokens
        self._add_work(opened.uncached, now)

    def started(self, opened: OpenRequest, now: float, cached: int | None = None) -> None:
        """Its first token came. `cached`: prompt tokens found in the cache, if the replica reported it."""
        expected = opened.uncached
        del self._waiting[opened]
        self.queued -= expected
        opened.started = now
        if cached is not None:
            opened.uncached = opened.request.prompt_tokens - cached
            self._add_work(opened.uncached - expected, now)
        if opened.uncached >= MIN_MEASURED_TOKENS:
            for speed in (self._own_speed, self._group_speed):
                speed.note(opened.uncached, now - self._busy_since)
        self._busy_since = now

    def generated_more(self, opened: OpenRequest, tokens: int, now: float) -> None:
        """It has generated `tokens` more tokens."""
        opened.generated += tokens
        self.generated += tokens
        self.kv_tokens += tokens
        self._add_work(tokens, now)

    def finished(self, opened: OpenRequest, now: float) -> None:
        """It has ended, for whatever reason."""
        opened.is_over = True
        del self.requests[opened]
        if opened in self._waiting:
            # It still counts as work although it was not done: a replica that fails every request must not look idle.
            del self._waiting[opened]
            self.queued -= opened.uncached
        else:
            self._request_seconds.note(now - opened.launched, 1.0)
        self.rows -= opened.request.sequences
        self.generated -= opened.generated
        self.kv_tokens -= opened.request.prompt_tokens + opened.generated

    # Estimates

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens a second."""
        own, group = self._own_speed.value, self._group_speed.value
        return group if group / SPEED_TOLERANCE < own < group * SPEED_TOLERANCE else own

    def wait(self, now: float) -> float:
        """Seconds until a prompt that arrives now would be started."""
        speed = self.prefill_speed
        tokens: float = self.queued + ROW_TOKENS * self.rows
        if self._waiting:
            # The progress of the prompt being computed is unknown. At most all of it is done: a replica that hangs must
            # not look as if it had caught up.
            tokens -= min(next(iter(self._waiting)).uncached, speed * (now - self._busy_since))
        seconds = tokens / speed
        crowding = max(self.rows / self.max_rows, self.kv_tokens / self.max_kv_tokens)
        if crowding > 1:
            seconds += (crowding - 1) * self._request_seconds.value
        return seconds

    def work(self, now: float) -> float:
        """Tokens computed recently, of prompts and outputs, weighted by age."""
        return self._work * 0.5 ** ((now - self._work_at) / HALF_LIFE_SECONDS)

    def _add_work(self, tokens: float, now: float) -> None:
        self._work = self.work(now) + tokens
        self._work_at = now
