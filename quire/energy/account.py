"""Who used the energy: what a meter counts is shared out among the requests that were computed, and idle time.

At a sample, the joules since the last one are split by time: what the machine draws when idle, for the part in which no
step ran, is idle; the rest is work. Work is shared by the time that steps took, and within a step by tokens times the
measured cost of a token of its kind (prompt or decode).

A request must not wait for the next sample to be told its share. So every step charges its requests at once, at the
power measured last, and a sample corrects the charges of those requests that have not ended. What cannot be corrected
any more is carried on to the next sample, so that at any moment

    charged to requests + carried + idle = the meter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NEWEST_WEIGHT = 0.2
"""Weight of the newest value in averages."""
IDLE_SHARE = 0.02
"""An interval in which steps ran for at most this share of the time measures idle power."""

LEAST_IDLE_SECONDS = 0.09
"""…if it is at least this long."""


@dataclass
class _Costs:
    """Seconds that a token of each kind takes, from measured steps. Only their ratio matters."""

    decode: float = 0.0
    prompt: float = 0.0

    def learn(self, decodes: int, prompts: int, seconds: float) -> None:
        if decodes and not prompts:
            self.decode = _average(self.decode, seconds / decodes)
        elif prompts:
            rest = seconds - self.decode * decodes
            self.prompt = _average(self.prompt, max(rest, 0.1 * seconds) / prompts)

    def prompt_share(self, decodes: int, prompts: int) -> float:
        """The part of a step's work that its prompt tokens are."""
        if not prompts or not decodes:
            return 1.0 if prompts else 0.0
        decode = self.decode or self.prompt or 1.0
        prompt = self.prompt or decode
        return prompt * prompts / (prompt * prompts + decode * decodes)


def _average(before: float, value: float) -> float:
    return value if not before else before + NEWEST_WEIGHT * (value - before)


@dataclass
class EnergyAccount:
    """Shares out a meter's joules. Times are in seconds, of any clock."""

    prompt: float = 0.0
    decode: float = 0.0
    idle: float = 0.0
    """Joules measured so far, by what they were for."""
    busy_watts: float | None = None
    """Power while steps run…"""
    idle_watts: float | None = None
    """…and while none does; None: not measured yet."""
    watts: float = 0.0
    """Power over the last interval."""
    charged: float = 0.0
    """Joules that requests were told so far."""
    _all_watts: float | None = None
    """Joules of intervals over the time of steps in them."""
    _costs: _Costs = field(default_factory=_Costs)
    _at: float | None = None
    _reading: float = 0.0
    _busy: float = 0.0
    """Seconds of steps since the last sample, and of these…"""
    _prompt_busy: float = 0.0
    """…those that prompt tokens took."""
    _work: dict[str, float] = field(default_factory=dict)
    """Seconds of work since the last sample, by request that has not ended. Each second was charged `_price` joules."""
    _price: float = 0.0
    _requests: list[str] = field(default_factory=list)
    _joules: list[float] = field(default_factory=list)
    """Charges that were not taken yet."""

    @property
    def total(self) -> float:
        """Joules of the meter at the last sample."""
        return self.prompt + self.decode + self.idle

    @property
    def carried(self) -> float:
        """Joules of work that no request was charged yet; negative: charged ahead of the next sample."""
        return self.prompt + self.decode - self.charged

    @property
    def step_watts(self) -> float | None:
        """Power while steps run. As long as idle power is not known, pauses between steps are counted to the steps: so
        pauses that are computed from it grow until the average is right."""
        return self._all_watts if self.idle_watts is None else self.busy_watts

    def step(
        self,
        requests: Sequence[str],
        counts: Sequence[int],
        num_decodes: int,
        seconds: float,
        is_open: Sequence[bool] | None = None,
    ) -> None:
        """A step has run for `seconds`. `requests` compute `counts` tokens each, the first `num_decodes` are decodes.
        What those that have ended meanwhile (not `is_open`) computed is charged to the others."""
        decodes, prompts = sum(counts[:num_decodes]), sum(counts[num_decodes:])
        self._costs.learn(decodes, prompts, seconds)
        share = self._costs.prompt_share(decodes, prompts)
        self._busy += seconds
        self._prompt_busy += share * seconds
        if is_open is None and decodes == len(requests):  # the common case: a token for every request
            shares = [seconds / decodes] * decodes if decodes else []
        else:
            requests, shares = self._uneven(requests, counts, num_decodes, seconds, share, is_open)
        work, price = self._work, self._price
        for request, part in zip(requests, shares, strict=True):
            work[request] = work.get(request, 0.0) + part
        self._charge(requests, [price * part for part in shares])

    def _uneven(
        self,
        requests: Sequence[str],
        counts: Sequence[int],
        num_decodes: int,
        seconds: float,
        prompt_share: float,
        is_open: Sequence[bool] | None,
    ) -> tuple[list[str], list[float]]:
        """The requests that are charged for a step, and the seconds of each."""
        each_decode = (1 - prompt_share) / max(1, sum(counts[:num_decodes]))
        each_prompt = prompt_share / max(1, sum(counts[num_decodes:]))
        kept = [i for i in range(len(requests)) if is_open is None or is_open[i]]
        parts = [counts[i] * (each_decode if i < num_decodes else each_prompt) for i in kept]
        whole = sum(parts)
        return [requests[i] for i in kept], [seconds * part / whole for part in parts]

    def _charge(self, requests: Sequence[str], joules: Sequence[float]) -> None:
        self.charged += sum(joules)
        self._requests += requests
        self._joules += joules

    def sample(self, reading: float, now: float) -> None:
        """The meter shows `reading` joules."""
        if self._at is None:
            self._at, self._reading = now, reading
            self._forget_interval()
            return
        elapsed, used = now - self._at, max(0.0, reading - self._reading)
        self._at, self._reading = now, max(reading, self._reading)
        idle = self._idle_part(elapsed, used)
        work = used - idle
        prompt = work * self._prompt_busy / self._busy if self._busy else 0.0
        self.idle += idle
        self.prompt += prompt
        self.decode += work - prompt
        if elapsed > 0:
            self.watts = used / elapsed
            self._learn(elapsed, used, work)
        self._correct()
        self._forget_interval()

    def _idle_part(self, elapsed: float, used: float) -> float:
        if not self._busy:
            return used
        pause = max(0.0, elapsed - self._busy)
        if self.idle_watts is None:  # as if the machine drew the same all the time
            return used * pause / max(elapsed, self._busy)
        return min(used, self.idle_watts * pause)

    def _learn(self, elapsed: float, used: float, work: float) -> None:
        if self._busy <= IDLE_SHARE * elapsed and elapsed >= LEAST_IDLE_SECONDS:
            watts = used / elapsed
            self.idle_watts = watts if self.idle_watts is None else _average(self.idle_watts, watts)
        if self._busy:
            self.busy_watts = _average(self.busy_watts or 0.0, work / self._busy)
            self._all_watts = _average(self._all_watts or 0.0, used / self._busy)

    def _correct(self) -> None:
        """Bring the charges of the requests that still can be told to what was measured."""
        total = sum(self._work.values())
        if not total:
            return
        wanted = self.carried / total
        # Never below zero for the interval: a request's joules do not fall.
        self._charge(list(self._work), [max(wanted, -self._price) * work for work in self._work.values()])

    def _forget_interval(self) -> None:
        self._busy = self._prompt_busy = 0.0
        self._work.clear()
        self._price = self.busy_watts or 0.0

    def take(self) -> tuple[list[str], list[float]]:
        """Requests that were charged since the last call, and the joules of each; one may come several times."""
        taken = self._requests, self._joules
        self._requests, self._joules = [], []
        return taken

    def end(self, requests: Sequence[str]) -> None:
        """These requests have been told their share: nothing is charged to them any more."""
        for request in requests:
            self._work.pop(request, None)
