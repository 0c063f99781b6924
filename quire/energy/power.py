"""Holds back steps so that the average power stays at a budget, and so that the device stays below its temperature.

A step that draws P watts for t seconds, then a pause of h at idle power I, averages B watts if h = t·(P − B)/(B − I).
That is the pause after each step; P and I are measured. What the estimate gets wrong adds up as a debt of joules above
the budget, which longer pauses pay back over a few seconds. There is no switching between full speed and none, and with
nothing owed the pauses end as soon as steps draw less than the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_HOLD_SECONDS = 1.0
"""A step is never held back longer than this, whatever the budget: streams keep moving."""
PAYBACK_SECONDS = 2.0
"""Time in which a debt is paid back."""
MOST_DEBT_SECONDS = 5.0
"""A debt is not remembered beyond what the budget allows in this time…"""
MOST_CREDIT_SECONDS = 0.05
"""…and a credit, from a time with little load, is nearly none: a burst after it is within the budget too."""
AIM = 0.99
"""The share of the budget that is aimed at: the average is to be at or below the budget, not around it."""
LEAST_GAP = 0.02
"""The budget is taken to be at least this share above idle power: below, no pause is long enough."""
WARM_DEGREES = 8.0
"""Steps slow down from this many degrees below the device's limit on…"""
LEAST_DUTY = 0.2
"""…to this share of the time."""


@dataclass
class PowerController:
    """The pause after a step. Fed with samples of a meter; knows no clock."""

    budget: float | None = None
    """Watts; None: no budget."""
    average: float = 0.0
    """Watts over about the last 10 s."""
    debt: float = 0.0
    """Joules used above the budget; negative: below."""
    duty: float = 1.0
    """Largest share of the time that steps may run, because of the temperature."""

    def sample(self, seconds: float, joules: float) -> None:
        """`joules` were used in the last `seconds`."""
        if seconds <= 0:
            return
        weight = min(1.0, seconds / 10.0) if self.average else 1.0
        self.average += weight * (joules / seconds - self.average)
        if self.budget is not None:
            aim = AIM * self.budget
            debt = self.debt + joules - aim * seconds
            self.debt = min(MOST_DEBT_SECONDS * aim, max(-MOST_CREDIT_SECONDS * aim, debt))

    def warm(self, headroom: float | None) -> None:
        """The device is `headroom` degrees below its limit; None: not known."""
        share = 1.0 if headroom is None else headroom / WARM_DEGREES
        self.duty = min(1.0, max(LEAST_DUTY, share))

    def hold(self, step_seconds: float, busy_watts: float | None, idle_watts: float | None) -> float:
        """Seconds to wait after a step that took `step_seconds`."""
        hold = step_seconds * (1 / self.duty - 1)
        if self.budget is not None and busy_watts is not None:
            aim = AIM * self.budget
            room = max(aim - (idle_watts or 0.0), LEAST_GAP * aim)
            pause = step_seconds * max(0.0, busy_watts - aim) / room
            pause += self.debt / room * (step_seconds + pause) / PAYBACK_SECONDS
            hold = max(hold, pause)
        return min(LONGEST_HOLD_SECONDS, max(0.0, hold))

    def is_unreachable(self, idle_watts: float | None) -> bool:
        """Whether the device draws more than the budget when idle."""
        return self.budget is not None and idle_watts is not None and idle_watts >= self.budget
