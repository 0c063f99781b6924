"""Counters of the scheduler, cheap enough to be always on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.messages.histogram import Histogram
from quire.messages.metric_table import STEP_TOKEN_BOUNDS
from quire.messages.outputs import Key
from quire.messages.plan import MAX_WIDTH, StepPlan
from quire.messages.request import Request

if TYPE_CHECKING:
    from quire.scheduler.preemption import MemoryPressure
    from quire.scheduler.request_table import RequestTable
    from quire.scheduler.step_builder import StepBuilder


class DraftStats:
    """Drafts that decodes verified, and why others verified none."""

    def __init__(self) -> None:
        self.draws = 0
        """Draws that verified drafts."""
        self.tokens = 0
        """Drafts that they verified."""
        self.accepted_by_place = np.zeros(MAX_WIDTH - 1, np.int64)
        """By place in the draw: drafts that were accepted."""
        self.chosen = np.zeros(MAX_WIDTH, np.int64)
        """Decodes by the number of drafts that were chosen for them."""
        self.excluded = 0
        """Decodes without drafts: of beam searches, at their last token, in steps that verify none…"""
        self.unavailable = 0
        """…for which there were none…"""
        self.unprofitable = 0
        """…and for which they were not expected to pay."""

    @property
    def accepted(self) -> int:
        return int(self.accepted_by_place.sum())

    @property
    def mean_length(self) -> float:
        """Tokens of a draw that verified drafts, the drawn one included."""
        return 1 + self.accepted / self.draws if self.draws else 1.0

    def note(self, drafts: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Draws have verified so many drafts, of which so many were accepted."""
        self.draws += int(np.count_nonzero(drafts))
        self.tokens += int(drafts.sum())
        self.accepted_by_place += (accepted[:, None] > np.arange(MAX_WIDTH - 1)).sum(0)


class SchedulerStats:
    """Sums over steps, and the last step."""

    def __init__(self) -> None:
        self.drafts = DraftStats()
        self.steps = 0
        self.step_tokens = Histogram(STEP_TOKEN_BOUNDS)
        """Tokens computed in each step."""
        self.yielded_tokens = Histogram(STEP_TOKEN_BOUNDS)
        """Of each step with outputs: tokens generated, and of prompts that got their first token or their vector,
        whichever steps computed them. vLLM's iteration tokens."""
        self._prompts: dict[Key, int] = {}
        """Prompts that had no output yet: tokens that were not cached."""
        self.prompt_tokens = 0
        """Known tokens computed (prompts and recomputation)."""
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.queried_tokens = 0
        """Known tokens of admitted requests; `cached_tokens` of them were found in the cache."""
        self.preemptions = 0
        self.swaps = 0
        """Preemptions of rows whose blocks were swapped out."""
        self.finished = 0
        self.allocated_slots = 0
        """Token slots held, summed over steps."""
        self.unused_slots = 0
        """Allocated slots without a token, summed over steps."""
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
        """The waste if each row had reserved `tokens` slots."""
        resident = self.allocated_slots - self.unused_slots
        return 1 - resident / (self.row_steps * tokens) if self.row_steps else 0.0

    def note_step(self, plan: StepPlan, builder: StepBuilder, requests: RequestTable, pressure: MemoryPressure) -> None:
        """Count a step that is about to be launched."""
        rows, pool = requests.rows, requests.tables.pool
        self.steps += 1
        self.step_tokens.add(plan.num_tokens)
        self.prompt_tokens += len(plan.tokens) + len(builder.ready)
        self.cached_tokens += builder.cached_tokens
        self.queried_tokens += builder.queried_tokens
        self.allocated_slots += pool.used * requests.tables.block_size
        self.unused_slots += int((rows.capacity - rows.computed).sum()) - _counted_twice(requests)
        self.row_steps += rows.used
        self._last = (plan, builder, pool.used, pool.free, pressure)

    def begin_prompt(self, key: Key, computed: int) -> None:
        """A sequence is computed for the first time, so many tokens of its prompt."""
        self._prompts[key] = computed

    def end_prompts(self, drawn: Iterable[Request]) -> int:
        """Requests have ended, or had their first draw; returns how many tokens were computed for it."""
        return sum(self._prompts.pop(request.key, 0) for request in drawn) if self._prompts else 0

    def note_results(self, tokens: int) -> None:
        """A step has yielded so many tokens, those of prompts with their first output included."""
        if tokens:
            self.yielded_tokens.add(tokens)

    def describe_step(self) -> str:
        """The last step in one readable line."""
        plan, builder, used, free, pressure = self._last
        prompts = len(plan.rows) - plan.num_decodes
        moves = "" if plan.moves is None else f", {len(plan.moves.out)} out, {len(plan.moves.back)} back"
        victims = "".join(f" {request.id}/{request.index}" for request in builder.preempted)
        drafts = f", {plan.num_drafts} drafts" if plan.num_drafts else ""
        return (
            f"step {plan.step}: {plan.num_decodes} decodes{drafts} + {prompts} prompts ({len(plan.tokens)} tokens), "
            f"blocks {used} used / {free} free, cache hits {builder.cached_tokens} of {builder.queried_tokens} tokens, "
            f"{len(builder.preempted)} preempted{victims}, {len(builder.copies)} copied{moves}, {pressure}"
        )


def _counted_twice(requests: RequestTable) -> int:
    """Unused slots of blocks that sequences of one prompt share, for all but one of the sequences."""
    rows = requests.rows
    if not requests.tables.has_full:
        return 0
    unused = {request: int(rows.capacity[request.row] - rows.computed[request.row]) for request in requests.forked}
    each_once = {request.blocks[-1]: slots for request, slots in unused.items()}
    return sum(unused.values()) - sum(each_once.values())
