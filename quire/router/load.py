"""How busy a replica is, as seen from outside: what was sent there, and what came back."""

from __future__ import annotations

from quire.router.request import RoutedFlight

HALF_LIFE = 20.0
"""Seconds after which work done counts half."""
GUESS = 4000.0
"""Prompt tokens a second, until something was measured."""
LEAST_TOKENS = 256
"""A prompt with fewer to compute says more about what a step costs than about what a token does."""
ALIKE = 1.4
"""Replicas whose speeds are within this factor of the fleet's count as equally fast: what differs is mostly noise, and
a replica that looks slower for no reason would get less work for none."""
ROW_TOKENS = 200
"""A sequence under way counts as so many prompt tokens before one's own: it has a part in every step."""


class Rate:
    """Things a second, over the last `span` measurements or so; a guess counts as one of them, a second long.

    Amounts and times are summed apart. Prompts computed in one step end together, and the second of them took no time
    of its own: a mean of ratios would take that for infinite speed.
    """

    def __init__(self, guess: float, span: int) -> None:
        self._amount, self._seconds = guess, 1.0
        self._keep = 1 - 1 / span

    def note(self, amount: float, seconds: float) -> None:
        """So much was done in so much time."""
        self._amount = self._keep * self._amount + amount
        self._seconds = self._keep * self._seconds + seconds

    @property
    def value(self) -> float:
        return self._amount / self._seconds


class GroupRates:
    """What the replicas have in common."""

    def __init__(self) -> None:
        self.prefill: Rate | None = None
        """Prompt tokens a second of one of them."""


class ReplicaLoad:
    """Bookkeeping of one replica's flights. All of it is zero again when they are over, but for `work`, which fades."""

    def __init__(self, fleet: GroupRates, rows: int, kv_tokens: int, prefill_speed: float | None = None) -> None:
        """Rows and tokens of KV that the replica has room for; prompt tokens a second, where known."""
        guess = GUESS if prefill_speed is None else prefill_speed
        fleet.prefill = fleet.prefill or Rate(guess, span=200)
        self._fleet = fleet.prefill
        self.max_rows, self.max_kv_tokens = rows, kv_tokens
        self.queued = 0
        """Prompt tokens that are to be computed still."""
        self.rows = 0
        """Sequences there, those whose prompt waits too."""
        self.kv_tokens = 0
        """Tokens of KV that all flights hold, or will when their prompts are computed."""
        self.generated = 0
        """Tokens that flights have generated."""
        self.flights: dict[RoutedFlight, None] = {}
        self._own = Rate(guess, span=50)
        self._waiting: dict[RoutedFlight, None] = {}
        self._busy_since = 0.0
        """When the last prompt was done, or the first came: what is computed since is not known."""
        self._stay = Rate(1.0, span=50)
        """Seconds that a flight stays."""
        self._work, self._work_at = 0.0, 0.0

    # What happens

    def launched(self, flight: RoutedFlight, now: float) -> None:
        """A request goes there."""
        request = flight.request
        if not self._waiting:
            self._busy_since = now
        self.flights[flight] = self._waiting[flight] = None
        self.queued += flight.uncached
        self.rows += request.samples
        self.kv_tokens += request.prompt_tokens
        self._add_work(flight.uncached, now)

    def started(self, flight: RoutedFlight, now: float, cached: int | None = None) -> None:
        """Its first token came; `cached` prompt tokens had not to be computed, where the replica says so."""
        believed = flight.uncached
        del self._waiting[flight]
        self.queued -= believed
        flight.started = now
        if cached is not None:
            flight.uncached = flight.request.prompt_tokens - cached
            self._add_work(flight.uncached - believed, now)
        if flight.uncached >= LEAST_TOKENS:
            for rate in (self._own, self._fleet):
                rate.note(flight.uncached, now - self._busy_since)
        self._busy_since = now

    def generated_more(self, flight: RoutedFlight, tokens: int, now: float) -> None:
        """More tokens of it came."""
        flight.generated += tokens
        self.generated += tokens
        self.kv_tokens += tokens
        self._add_work(tokens, now)

    def finished(self, flight: RoutedFlight, now: float) -> None:
        """It is over, for whatever reason."""
        flight.is_over = True
        del self.flights[flight]
        if flight in self._waiting:
            # It counts as work though it was not done: a replica that fails all it gets must not look idle for it.
            del self._waiting[flight]
            self.queued -= flight.uncached
        else:
            self._stay.note(now - flight.launched, 1.0)
        self.rows -= flight.request.samples
        self.generated -= flight.generated
        self.kv_tokens -= flight.request.prompt_tokens + flight.generated

    # What follows from it

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens a second."""
        own, fleet = self._own.value, self._fleet.value
        return fleet if fleet / ALIKE < own < fleet * ALIKE else own

    def wait(self, now: float) -> float:
        """Seconds until a prompt that comes now would be begun."""
        speed = self.prefill_speed
        tokens: float = self.queued + ROW_TOKENS * self.rows
        if self._waiting:
            # Nobody says how far the prompt under way is. No more than all of it can be done: a replica that hangs
            # must not look as if it had caught up.
            tokens -= min(next(iter(self._waiting)).uncached, speed * (now - self._busy_since))
        seconds = tokens / speed
        crowding = max(self.rows / self.max_rows, self.kv_tokens / self.max_kv_tokens)
        if crowding > 1:
            seconds += (crowding - 1) * self._stay.value
        return seconds

    def work(self, now: float) -> float:
        """Tokens computed lately, of prompts and outputs; the older, the less they count."""
        return self._work * 0.5 ** ((now - self._work_at) / HALF_LIFE)

    def _add_work(self, tokens: float, now: float) -> None:
        self._work = self.work(now) + tokens
        self._work_at = now
