"""Which drafts a row verifies in a plan: the device decides it, and the host comes to the same conclusion."""

from __future__ import annotations

from collections.abc import Sequence

from quire.messages.plan import StepPlan
from quire.messages.request import Request


class PlanDrafts:
    """The drafts that the rows of a plan verify, once every token before the plan is known.

    A plan is made before that. So its own drafts may begin with tokens that were drawn since, which are dropped, or
    differ from these; then all are. Rows that have none in the plan verify what the device proposed after their last
    draw, and rows that the plan adds verify nothing else.
    """

    def __init__(self, plan: StepPlan) -> None:
        self._made = {drafts.row: drafts for drafts in plan.drafts}
        self._added = {new.row for new in plan.add}

    def of(self, request: Request, width: int, proposed: Sequence[int]) -> list[int]:
        """Drafts of a draw of this width; the device may compute other tokens behind them, and accepts none of these.
        `proposed`: what the device proposed after the row's last draw."""
        if width == 1:
            return []
        if (made := self._made.get(request.row)) is None:
            return [] if request.row in self._added else list(proposed[: width - 1])
        drawn = request.tokens(made.start, request.known)
        if made.tokens[: len(drawn)] != drawn:
            return []
        return made.tokens[len(drawn) : len(drawn) + width - 1]
