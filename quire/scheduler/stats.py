"""Counters of the planning half, cheap enough to be always on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.messages.histogram import Histogram
from quire.messages.metric_table import STEP_TOKEN_BOUNDS
from quire.messages.plan import StepPlan
from quire.scheduler.draft import StepBuilder
from quire.scheduler.pressure import MemoryPressure

if TYPE_CHECKING:
    from quire.scheduler.request_table import RequestTable


class SchedulerStats:
    """Sums over steps, and the last step's figures."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_tokens = Histogram(STEP_TOKEN_BOUNDS)
        """Tokens of each step."""
        self.prompt_tokens = 0
        """Known tokens computed (prompts and recomputation)."""
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.queried_tokens = 0
        """Known tokens of admitted requests, of which `cached_tokens` were found in the cache."""
        self.preemptions = 0
        self.swaps = 0
        """Of these, rows whose blocks were put by."""
        self.finished = 0
        self.allocated_slots = 0
        """Token slots held, summed over steps…"""
        self.unused_slots = 0
        """…and those of them without a token."""
        self.row_steps = 0
        """Rows held, summed over steps."""

    @property
    def waste(self) -> float:
        """Share of the allocated token slots that held no token, over time."""
        return self.unused_slots / self.allocated_slots if self.allocated_slots else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of admitted tokens found in the prefix cache."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def waste_if_reserved(self, tokens: int) -> float:
        """What the waste would be if each row had reserved `tokens` slots."""
        resident = self.allocated_slots - self.unused_slots
        return 1 - resident / (self.row_steps * tokens) if self.row_steps else 0.0

    def note_step(self, plan: StepPlan, draft: StepBuilder, ledger: RequestTable, pressure: MemoryPressure) -> None:
        """Count a step that is about to be launched."""
        rows, pool = ledger.rows, ledger.tables.pool
        self.steps += 1
        self.step_tokens.add(plan.num_tokens)
        self.prompt_tokens += len(plan.tokens) + len(draft.ready)
        self.cached_tokens += draft.cached_tokens
        self.queried_tokens += draft.queried_tokens
        self.allocated_slots += pool.used * ledger.tables.block_size
        self.unused_slots += int((rows.capacity - rows.computed).sum()) - _counted_twice(ledger)
        self.row_steps += rows.used
        self._last = (plan, draft, pool.used, pool.free)
        self._pressure = pressure

    def describe_step(self) -> str:
        """The last step in one readable line."""
        plan, draft, used, free = self._last
        prompts = len(plan.rows) - plan.num_decodes
        moves = "" if plan.moves is None else f", {len(plan.moves.out)} out, {len(plan.moves.back)} back"
        victims = "".join(f" {request.id}/{request.index}" for request in draft.preempted)
        return (
            f"step {plan.step}: {plan.num_decodes} decodes + {prompts} prompts ({len(plan.tokens)} tokens), "
            f"blocks {used} used / {free} free, cache hits {draft.cached_tokens} of {draft.queried_tokens} tokens, "
            f"{len(draft.preempted)} preempted{victims}, {len(draft.copies)} copied{moves}, {self._pressure}"
        )


def _counted_twice(ledger: RequestTable) -> int:
    """Unused slots of blocks that samples of one prompt still share, beyond the first of them."""
    rows = ledger.rows
    unused = {request: int(rows.capacity[request.row] - rows.computed[request.row]) for request in ledger.forked}
    each_once = {request.blocks[-1]: slots for request, slots in unused.items()}
    return sum(unused.values()) - sum(each_once.values())
