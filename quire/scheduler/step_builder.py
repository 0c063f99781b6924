"""A step from its first decision (`StepBuilder`) to its plan (`PlanWriter`) and its result (`InFlightStep`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.messages.adapter_use import identity_start
from quire.messages.plan import Drafts, Fork, Ints, NewRow, PrefixGroup, StepPlan
from quire.messages.request import Request
from quire.scheduler.request_table import RequestTable


class StepBuilder:
    """What `schedule()` has decided so far."""

    def __init__(self) -> None:
        self.prompts: dict[Request, int] = {}
        """Requests that compute known tokens, and how many."""
        self.admitted: list[Request] = []
        self.ready: list[Request] = []
        """Admitted requests with only their last known token to compute: they decode at once."""
        self.awaits_moves = False
        """Rows of this step read the blocks that this plan loads from host memory."""
        self.is_stalled = False
        """A row lacks blocks that a transfer will free; nothing else may take them."""
        self.copies: list[tuple[int, int, int]] = []
        """(row, from, to) blocks to copy before anything is computed."""
        self.snapshots: list[tuple[int, int]] = []
        """(from, to) blocks to copy once everything is computed."""
        self.published: list[int] = []
        """Blocks that entered the prefix cache before they are written."""
        self.preempted: list[Request] = []
        self.drafts: dict[int, Drafts] = {}
        """By row: drafts made on the host."""
        self.proposals = 0
        """Drafts that the device makes for each row that draws."""
        self.cached_tokens = 0
        self.queried_tokens = 0
        self.block_rows: list[int] = []
        self.block_indices: list[int] = []
        self.blocks: list[int] = []
        self.block_groups: list[int] = []

    @property
    def is_empty(self) -> bool:
        """No prompt tokens to compute, and no newly admitted decodes."""
        return not self.prompts and not self.ready

    @property
    def can_admit(self) -> bool:
        """A step that preempts, or that waits for blocks, admits no request: it would take what others need."""
        return not self.preempted and not self.is_stalled

    def admit(self, request: Request, cached: int) -> None:
        """The request joins in this step; its blocks hold its first `cached` tokens."""
        self.admitted.append(request)
        self.cached_tokens += cached
        self.queried_tokens += request.known

    def decode(self, request: Request) -> None:
        """An admitted request computes its last known token like a decode."""
        self.ready.append(request)

    def prompt(self, request: Request, count: int) -> None:
        """The request computes its next `count` known tokens."""
        self.prompts[request] = count

    def assign(self, row: int, index: int, blocks: Sequence[int], group: int = 0) -> None:
        """The row's block table of a group holds `blocks` from `index` on."""
        self.block_rows.extend([row] * len(blocks))
        self.block_indices.extend(range(index, index + len(blocks)))
        self.blocks.extend(blocks)
        self.block_groups.extend([group] * len(blocks))

    def copy(self, row: int, source: int, target: int) -> None:
        """The row's first write into a shared block goes to a copy of it."""
        self.copies.append((row, source, target))

    def publish(self, blocks: list[int]) -> None:
        """This step fills blocks that the prefix cache lists already."""
        self.published += blocks

    def unpublish(self, blocks: list[int]) -> list[int]:
        """Those of `blocks` that were published for this step; they no longer are."""
        gone = set(blocks).intersection(self.published)
        self.published = [block for block in self.published if block not in gone]
        return list(gone)

    def preempt(self, request: Request) -> None:
        """The request is about to leave its row; nothing of it may stay in this step."""
        self.preempted.append(request)
        self.prompts.pop(request, None)
        self.ready = [other for other in self.ready if other is not request]
        self.copies = [copy for copy in self.copies if copy[0] != request.row]
        kept = [i for i, row in enumerate(self.block_rows) if row != request.row]
        self.block_rows = [self.block_rows[i] for i in kept]
        self.block_indices = [self.block_indices[i] for i in kept]
        self.blocks = [self.blocks[i] for i in kept]
        self.block_groups = [self.block_groups[i] for i in kept]


@dataclass
class InFlightStep:
    """A launched step whose result is not collected."""

    step: int
    requests: list[Request]
    """Every request with a row in the step, in the plan's order."""
    draws: list[Request]
    """The request of each draw."""
    rows: NDArray[np.int32]
    """The row of each draw, and that row's epoch at launch."""
    epochs: NDArray[np.int64]
    num_decodes: int
    """The first `num_decodes` draws are not their request's first."""
    widths: NDArray[np.int64] | None = None
    """Tokens that each draw may yield; None: one each."""
    num_drafts: int = 0
    """Drafts that the decodes verify."""
    proposals: int = 0
    """Drafts that the device makes for each row that draws."""
    has_beams: bool = False
    """Some draws are for beams: they yield candidates to choose from, not tokens."""
    prompt_tokens: int = 0
    launched: float = 0.0
    awaits_moves: bool = False
    """Its duration includes copies between tiers."""
    published: list[int] = field(default_factory=list)
    """Blocks that entered the prefix cache before they are written."""
    ready: list[Request] = field(default_factory=list)
    """Requests among the decodes that have just got their row: all their tokens but the last were computed."""

    @property
    def prompts_drawn(self) -> Iterator[Request]:
        """Requests that have drawn for the first time since they have their row."""
        return chain(self.ready, self.draws[self.num_decodes :])

    def width_of(self, draw: int) -> int:
        """Tokens that a draw may yield."""
        return 1 if self.widths is None else int(self.widths[draw])

    def draws_for(self, row: int, epoch: int) -> int:
        """How many draws go to the row's owner of that epoch."""
        return int(np.count_nonzero((self.rows == row) & (self.epochs == epoch)))


class PlanWriter:
    """Writes numbered plans. Each holds only what the device does not have yet."""

    def __init__(
        self,
        requests: RequestTable,
        clock: Callable[[], float] = time.monotonic,
        holds_rows: bool = False,
        with_following: bool = False,
    ) -> None:
        """`holds_rows`: a row is planned again only when its draw is collected, and the plan then carries the token;
        otherwise the device already has it. `with_following`: plans have the token after each chunk of a prompt."""
        self._requests = requests
        self._clock = clock
        self._holds_rows = holds_rows
        self._with_following = with_following
        self._step = 0
        self._reset = False

    def reset(self) -> None:
        """The next plan makes the device drop every row."""
        self._reset = True

    def write(self, builder: StepBuilder, decodes: NDArray[np.int64]) -> tuple[StepPlan, InFlightStep]:
        """The plan of the step, and what is needed to apply its result. Counts its tokens as computed."""
        table, rows = self._requests, self._requests.rows
        by_row = not table.tables.has_full  # the device finds no token ids in blocks
        added = [_new_row(request, int(rows.computed[request.row]), by_row) for request in builder.admitted]
        if table.adapters.is_on:
            for new, request in zip(added, builder.admitted, strict=True):
                if (slot := table.adapters.slot_of(request.source)) >= 0:
                    new.adapter, new.adapter_start = slot, identity_start(request.kv_identity)
        widths = rows.width[decodes] if rows.is_wide else None
        rewound = self._rewound(decodes)
        rows.plan_decodes(decodes, widths)
        num_drafts = 0 if widths is None else int(widths.sum()) - len(decodes)
        requests: list[Request] = [rows.requests[row] for row in decodes.tolist()]
        draws = list(requests)
        samples: list[int] = []
        sample_rows: list[int] = []
        tokens: list[int] = []
        following: list[int] = []
        forks: list[Fork] = []
        encoding = table.encoding
        before = len(decodes) + num_drafts
        for request, count in builder.prompts.items():
            if encoding.is_on and request.source.media:
                start = int(rows.computed[request.row])
                encoding.read(request, start, count, before + len(tokens))
            chunk, is_last = table.compute_chunk(request, count)
            tokens += chunk
            if self._with_following:
                following += [-1] if is_last else table.next_tokens(request, 1)
            if is_last:
                children = table.fork_siblings(request)
                forks += [Fork(request.row, child.row, child.index, child.id) for child in children]
                for drawer in (request, *children):
                    draws.append(drawer)
                    samples.append(len(requests))
                    sample_rows.append(drawer.row)
            requests.append(request)
        scheduled = _then(decodes, [request.row for request in builder.prompts])
        targets = _then(decodes, sample_rows)
        dropped, branches = table.take_row_changes()
        table.states.write(builder)
        plan = StepPlan(
            step=self._step,
            rows=scheduled,
            counts=_then(np.ones(len(decodes)) if widths is None else widths, list(builder.prompts.values())),
            num_decodes=len(decodes),
            tokens=_ints(tokens),
            samples=_then(np.arange(len(decodes)), samples),
            sample_rows=targets,
            block_rows=_ints(builder.block_rows),
            block_indices=_ints(builder.block_indices),
            blocks=_ints(builder.blocks),
            block_groups=_ints(builder.block_groups if any(builder.block_groups) else []),
            max_context=int(rows.computed[scheduled].max(initial=0)),
            reset=self._reset,
            drop=dropped,
            add=added,
            forks=forks,
            copies=[(source, target) for _, source, target in builder.copies],
            branches=branches,
            snapshots=builder.snapshots,
            forced=self._forced(decodes, builder.ready),
            moves=table.swapper.take_moves(self._step, not requests, builder.awaits_moves),
            adapters=table.adapters.take_loads() if table.adapters.is_loading else [],
            groups=self._groups(),
            num_drafts=num_drafts,
            drafts=[builder.drafts[row] for row in decodes.tolist() if row in builder.drafts] if num_drafts else [],
            proposals=builder.proposals,
            following=_ints(following),
            rewound=rewound,
        )
        table.states.written()
        if encoding.is_on:
            encoding.write(plan)
        self._step += 1
        self._reset = False
        has_beams = rows.plan_draws(targets, plan.step, self._holds_rows)
        if widths is not None:
            widths = np.concatenate([widths, np.ones(len(targets) - len(decodes), np.int64)])
        return plan, InFlightStep(
            plan.step, requests, draws, targets, rows.epoch[targets], len(decodes), widths, num_drafts,
            builder.proposals, has_beams, len(tokens), self._clock(), builder.awaits_moves, builder.published,
            builder.ready,
        )  # fmt: skip

    def _rewound(self, decodes: NDArray[np.int64]) -> list[tuple[int, int]]:
        """How many tokens of rows are computed, where the stages before the last cannot know it."""
        rows = self._requests.rows
        if not self._holds_rows or not rows.rewinds.any():
            return []
        found = decodes[rows.rewinds[decodes]]
        rows.rewinds[found] = False
        return list(zip(found.tolist(), rows.computed[found].tolist(), strict=True))

    def _forced(self, decodes: NDArray[np.int64], ready: list[Request]) -> list[tuple[int, int]]:
        """Last tokens that the device does not have: of beams, whose token the host chose; of rows that have just
        joined; and of all rows where only some ranks draw."""
        rows = self._requests.rows
        if self._holds_rows:
            unknown = [rows.requests[row] for row in decodes.tolist()]
        else:
            unknown = [*ready, *(rows.requests[row] for row in decodes[rows.is_beam[decodes]].tolist())]
        return [(request.row, request.tokens(request.known - 1, request.known)[0]) for request in unknown if request]

    def _groups(self) -> list[PrefixGroup] | None:
        """Groups of rows that share a prefix; None if the device has the same ones."""
        changes = self._requests.groups.changes()
        return [] if changes is None and self._reset else changes


NOTHING = np.empty(0, np.int32)


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32) if values else NOTHING


def _then(of_decodes: NDArray[Any], of_prompts: list[int]) -> Ints:
    """A column of a plan: what decodes have in it, then prompts."""
    column = of_decodes.astype(np.int32)
    return np.concatenate([column, _ints(of_prompts)]) if of_prompts else column


def _new_row(request: Request, cached: int, with_tokens: bool) -> NewRow:
    source = request.source
    return NewRow(
        row=request.row,
        request=request.id,
        prompt_len=len(request.prompt),
        num_tokens=request.known,
        num_computed=cached,
        limit=source.limit,
        seed=source.seed,
        sequence=request.index,
        params=source.params,
        stop_ids=source.stop_ids,
        bad_words=source.bad_words,
        pooling=None if source.pooling is None else source.pooling.pooling,
        computed=_ints(request.tokens(0, cached) if with_tokens else []),
        position_delta=source.position_delta,
    )
