"""A draft becomes a plan: numbers for the device, and a flight to remember it by."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.messages.plan import Fork, Ints, NewRow, PrefixGroup, StepPlan
from quire.messages.request import Request, RequestState
from quire.scheduler.draft import InFlightStep, StepBuilder
from quire.scheduler.request_table import RequestTable
from quire.scheduler.swapping import Swapper


class PlanWriter:
    """Numbers the plans, and tells each one what the device does not know yet."""

    def __init__(
        self,
        ledger: RequestTable,
        moving: Swapper | None = None,
        clock: Callable[[], float] = time.monotonic,
        holds: bool = False,
    ) -> None:
        """`holds`: a row is planned again when its draw is collected, and the plan says what was drawn; else the
        device has it."""
        self._holds = holds
        self._ledger = ledger
        self._moving = moving
        self._clock = clock
        self._step = 0
        self._reset = False

    def start_over(self) -> None:
        """The next plan tells the device to forget every row."""
        self._reset = True

    def write(self, draft: StepBuilder, decodes: NDArray[np.int64]) -> tuple[StepPlan, InFlightStep]:
        """Count the draft's tokens as computed and its draws as bound to come, and write it down."""
        rows = self._ledger.rows
        added = [_new_row(request, int(rows.computed[request.row])) for request in draft.admitted]
        rows.computed[decodes] += 1
        rows.bound[decodes] += 1
        requests: list[Request] = [rows.requests[row] for row in decodes.tolist()]
        draws, samples, sample_rows = list(requests), list(range(len(decodes))), decodes.tolist()
        tokens: list[int] = []
        for request, count in draft.prompts.items():
            row = request.row
            start = int(rows.computed[row])
            tokens += request.tokens(start, start + count)
            rows.computed[row] = start + count
            if start + count == rows.bound[row]:
                self._ledger.prefilling.pop(request, None)
                rows.bound[row] += 1
                rows.decoding[row] = True
                for drawer in (request, *self._fork_siblings(draft, request)):
                    self._ledger.note_decoding(drawer)
                    draws.append(drawer)
                    samples.append(len(requests))
                    sample_rows.append(drawer.row)
            requests.append(request)
        scheduled = _ints([request.row for request in requests]) if draft.prompts else decodes.astype(np.int32)
        targets = _ints(sample_rows)
        plan = StepPlan(
            step=self._step,
            rows=scheduled,
            counts=_ints([1] * len(decodes) + list(draft.prompts.values())),
            num_decodes=len(decodes),
            tokens=_ints(tokens),
            samples=_ints(samples),
            sample_rows=targets,
            block_rows=_ints(draft.block_rows),
            block_indices=_ints(draft.block_indices),
            blocks=_ints(draft.blocks),
            max_context=int(rows.computed[scheduled].max(initial=0)),
            reset=self._reset,
            drop=self._ledger.dropped,
            add=added,
            forks=draft.forks,
            copies=[(source, own) for _, source, own in draft.copies],
            branches=list(self._ledger.branches.values()),
            forced=self._forced(decodes, draft.ready),
            moves=None if self._moving is None else self._moving.take(self._step, not requests, draft.awaits_moves),
            groups=self._groups(),
        )
        self._step += 1
        self._ledger.dropped = []
        self._ledger.branches = {}
        self._reset = False
        beams = rows.is_beam[targets]
        rows.held[targets] = beams | self._holds
        rows.planned[targets] = plan.step
        epochs = rows.epoch[targets]
        return plan, InFlightStep(
            plan.step, requests, draws, targets, epochs, len(decodes), bool(beams.any()), len(tokens), self._clock(),
            draft.awaits_moves, draft.published,
        )  # fmt: skip

    def _forced(self, decodes: NDArray[np.int64], ready: list[Request]) -> list[tuple[int, int]]:
        """Beams continue with what was chosen for them, where the device has what it would have drawn; rows that have
        just joined, with their last token, of which it knows nothing; and all rows where only some ranks draw."""
        rows = self._ledger.rows
        if self._holds:
            told = [rows.requests[row] for row in decodes.tolist()]
        else:
            told = [*ready, *(rows.requests[row] for row in decodes[rows.is_beam[decodes]].tolist())]
        return [(request.row, request.tokens(request.known - 1, request.known)[0]) for request in told if request]

    def _groups(self) -> list[PrefixGroup] | None:
        """Rows that begin alike, if the device knows other ones."""
        changes = None if self._ledger.groups is None else self._ledger.groups.changes()
        return [] if changes is None and self._reset else changes

    def _fork_siblings(self, draft: StepBuilder, parent: Request) -> list[Request]:
        """The prompt is computed: its other samples fork from this row, or queue up if rows run out."""
        rows, forked = self._ledger.rows, []
        for child in parent.siblings:
            if child.is_finished:
                continue
            if self._ledger.has_row_for(child):
                self._ledger.tables.fork(parent, child)
                row = rows.take(child, computed=parent.known, bound=parent.known + 1)
                rows.capacity[row] = rows.capacity[parent.row]
                rows.decoding[row] = True
                child.move(RequestState.RUNNING)
                child.first_scheduled, child.num_cached = parent.first_scheduled, parent.num_cached
                child.keys = list(parent.keys)
                draft.forks.append(Fork(parent.row, row, child.index, child.id))
                forked.append(child)
            else:
                self._ledger.policy.add(child)
        if forked:
            self._ledger.forked.update((parent, *forked))
        parent.siblings = []
        return forked


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)


def _new_row(request: Request, cached: int) -> NewRow:
    source = request.source
    return NewRow(
        row=request.row,
        request=request.id,
        prompt_len=len(request.prompt),
        num_tokens=request.known,
        num_computed=cached,
        limit=source.limit,
        seed=source.seed,
        sample=request.index,
        params=source.params,
        stop_ids=source.stop_ids,
        bad_words=source.bad_words,
        pooling=None if source.pooling is None else source.pooling.pooling,
    )
