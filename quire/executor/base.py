"""What the loop asks of an executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quire.executor.expert_balance import ExpertBalance
from quire.messages.experts import Rebalanced
from quire.messages.plan import StepMasks, StepPlan, StepResult

SPIN_SECONDS = 0.005
"""So long a wait asks again and again, as the driver's own does; Python would not switch threads sooner either."""
PAUSE_SHARE = 0.01
"""Then it sleeps a hundredth of the time it has waited: no wait is longer by more than that."""


def pause_after(waited: float) -> float:
    """How long to sleep before asking the device again, after so many seconds of waiting for it."""
    return 0.0 if waited < SPIN_SECONDS else min(PAUSE_SHARE * waited, 0.001)


class Executor(Protocol):
    """Runs plans in order. `submit` returns at once; `collect` waits for that step's result.

    A step with a draw for a row that has a form to keep draws nothing before `supply`, and no other can be submitted.
    """

    @property
    def balance(self) -> ExpertBalance | None:
        """Where whole experts are, if they are spread over ranks."""
        ...

    @property
    def lockstep(self) -> Lockstep | None:
        """Itself, if it steps together with other engines'."""
        ...

    def submit(self, plan: StepPlan) -> Any:
        """Launch the step; returns a handle."""
        ...

    def supply(self, handle: Any, masks: StepMasks) -> None:
        """What such a step may draw; raises StepError like `collect`."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """The step's result; raises StepError if it failed, DeviceLostError if no other can follow."""
        ...

    def expert_counts(self) -> Mapping[int, Sequence[int]]:
        """How often each expert was chosen, by layer; empty for a model without. Waits for the device."""
        ...

    def rebalance_experts(self) -> Rebalanced | None:
        """Between two steps, move experts to where the load is. None where they have nowhere else to go."""
        ...

    def check(self) -> float | None:
        """Raise DeviceLostError if a rank has died while nobody waited; seconds until one should look again, None for
        ever."""
        ...

    def give_up(self, message: str) -> None:
        """From any thread: a `collect` that still waits raises DeviceLostError with this message."""
        ...

    def shutdown(self) -> None:
        """Give everything back."""
        ...


class Lockstep(Executor, Protocol):
    """Runs plans when it is the turn of all engines that share the experts."""

    @property
    def is_on(self) -> bool:
        """Whether the engines take turns: then there is a step to make, with or without a plan."""
        ...

    def rouse(self, number: int) -> None:
        """A request, the `number`-th of all, has come to one of the engines."""
        ...

    def accompany(self, has_work: bool) -> bool:
        """There is no plan here: take a turn with the others. Whether a pass was made."""
        ...

    def ask_to_rebalance(self, number: int) -> None:
        """Move experts when all engines have been asked; `take_rebalanced` tells."""
        ...

    def take_rebalanced(self) -> list[Rebalanced]:
        """What came of it, of each time since this was asked last."""
        ...
