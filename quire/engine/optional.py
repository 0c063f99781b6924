"""Parts of the loop that an engine may not have: the same methods, doing nothing."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import ValidationError
from quire.messages.experts import Rebalanced
from quire.messages.histogram import COMPILE_BOUNDS, Histogram
from quire.messages.outputs import Key
from quire.messages.plan import StepMasks, StepPlan
from quire.messages.request import NewRequest, Request


class NoGrammars:
    """No structured output: such requests are refused."""

    is_active = False
    num_waiting = 0

    def __init__(self) -> None:
        self.compile_times = Histogram(COMPILE_BOUNDS)

    @property
    def end_ids(self) -> list[int]:
        return []

    def prepare(self, end_ids: Sequence[int]) -> None: ...

    def add(self, source: NewRequest) -> None:
        raise ValidationError("this engine has no structured output", "structured_outputs")

    def poll(self) -> list[tuple[str, str]]:
        return []

    def wait(self, seconds: float, wakes: Sequence[int] = ()) -> None: ...

    def note_proposed(self, draws: Sequence[Request], proposed: Sequence[list[int]]) -> None: ...

    def advance(self) -> None: ...

    def await_certain(self) -> None: ...

    def certain_drafts(self, key: Key) -> list[int] | None:
        return None

    def masks(
        self, plan: StepPlan, draws: Sequence[Request]
    ) -> tuple[StepMasks, list[Request], list[tuple[Request, str]]]:
        raise RuntimeError("there are no grammars to make masks from")

    def forget(self, request: Request, is_last: bool) -> None: ...

    def shutdown(self) -> None: ...


class NoLockstep:
    """The engine steps on its own."""

    is_active = False

    def wake(self, number: int) -> None: ...

    def join_round(self, has_work: bool) -> bool:
        return False

    def take_rebalanced(self) -> list[Rebalanced]:
        return []
