"""A plan while it is being written, and a step while it is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.messages.plan import Fork
from quire.messages.request import Request


class StepBuilder:
    """What `schedule()` has decided so far."""

    def __init__(self) -> None:
        self.prompts: dict[Request, int] = {}
        """Rows that compute known tokens, and how many."""
        self.admitted: list[Request] = []
        self.ready: list[Request] = []
        """…of them, those whose last known token alone is to be computed: they decode at once."""
        self.awaits_moves = False
        """What comes with this plan from a tier below is read in this very step."""
        self.is_stalled = False
        """Somebody lacks blocks that are on their way."""
        self.forks: list[Fork] = []
        self.copies: list[tuple[int, int, int]] = []
        """(row, from, to)."""
        self.block_rows: list[int] = []
        self.block_indices: list[int] = []
        self.blocks: list[int] = []
        self.published: list[int] = []
        self.preempted: list[Request] = []
        self.cached_tokens = 0
        self.queried_tokens = 0

    def assign(self, row: int, index: int, blocks: list[int]) -> None:
        """The row's table holds `blocks` from `index` on."""
        self.block_rows.extend([row] * len(blocks))
        self.block_indices.extend(range(index, index + len(blocks)))
        self.blocks.extend(blocks)

    def withdraw(self, request: Request) -> None:
        """The request leaves its row; nothing of it may stay in this step."""
        self.prompts.pop(request, None)
        self.ready = [other for other in self.ready if other is not request]
        self.copies = [copy for copy in self.copies if copy[0] != request.row]
        kept = [i for i, row in enumerate(self.block_rows) if row != request.row]
        self.block_rows = [self.block_rows[i] for i in kept]
        self.block_indices = [self.block_indices[i] for i in kept]
        self.blocks = [self.blocks[i] for i in kept]


@dataclass
class InFlightStep:
    """A launched step whose result is not collected."""

    step: int
    requests: list[Request]
    """Every request with a row in the step, in the plan's order."""
    draws: list[Request]
    """Who each draw is for."""
    rows: NDArray[np.int32]
    """The row of each draw, and that row's epoch at launch."""
    epochs: NDArray[np.int64]
    num_decodes: int
    """The first so many draws are not their request's first."""
    has_beams: bool = False
    """Some draws are for beams: what they yield is a choice to make, not tokens."""
    prompt_tokens: int = 0
    launched: float = 0.0
    awaits_moves: bool = False
    """Its time is that of copies, too."""
    published: list[int] = field(default_factory=list)
    """Blocks that went into the prefix index before they were written."""

    def draws_for(self, row: int, epoch: int) -> int:
        """How many draws go to the row's owner of that epoch."""
        return int(np.count_nonzero((self.rows == row) & (self.epochs == epoch)))
