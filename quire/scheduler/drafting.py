"""Drafts: how many each decode verifies, and where they come from.

A proposer on the device makes drafts after each draw, and they stay there; all that is known here is how many there may
be. A proposer on the host guesses from known tokens, while a step runs: the run it proposes goes with the next plan,
and the device drops from it what the row has drawn since.

Verification is exact, so nothing here changes a token, only how fast it comes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.messages.outputs import Key
from quire.messages.plan import MAX_WIDTH, Drafts, StepPlan, StepResult
from quire.messages.request import Request
from quire.messages.speculation import DeviceDrafts
from quire.scheduler.draft_tuning import Choice, Tuner
from quire.speculative.host import HostProposer
from quire.speculative.prediction import PredictedText

if TYPE_CHECKING:
    from quire.scheduler.request_table import RequestTable
    from quire.scheduler.stats import DraftStats
    from quire.scheduler.step_builder import InFlightStep, StepBuilder

logger = logging.getLogger(__name__)

MOST_DRAFTS = MAX_WIDTH - 1
UNKNOWN = np.int64(-1)
ASK_WEIGHT = 0.1
"""Weight of the newest step in the average time that the host's proposer takes."""
CACHE_COST = 0.015
"""A proposer with a cache of its own whose draft costs less than this share of a step makes one in every step."""
ASK_SHARE = 0.005
"""A proposer on the host that takes less than this share of a step is asked for every row."""


class NoDrafting:
    """No decode verifies drafts: the methods of `Drafting`, doing nothing."""

    is_on = has_host = needs_following = False

    def plan(self, builder: StepBuilder, ready: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
        return ready

    def start(self, request: Request) -> None: ...

    def extend(self, requests: Sequence[Request], tokens: list[int], counts: Sequence[int] | None = None) -> None: ...

    def leave(self, request: Request, has_ended: bool = False) -> None: ...

    def settle(self, builder: StepBuilder) -> None: ...

    def launched(self, plan: StepPlan, step: InFlightStep) -> None: ...

    def collected(self, step: InFlightStep, result: StepResult, now: float) -> None: ...

    def forget_in_flight(self) -> None: ...


class Drafting:
    """Chooses how many drafts the decodes of a step verify, and asks the proposers for them."""

    is_on = True

    def __init__(
        self,
        most: int = MOST_DRAFTS,
        host: HostProposer | None = None,
        device: DeviceDrafts | None = None,
        tunes: bool = False,
        most_rows: int | None = None,
        longest: int | None = None,
        certain: Callable[[Key], list[int] | None] | None = None,
        vocab_size: int = 2**31,
    ) -> None:
        """`most`: drafts that a decode verifies at most. `host`, `device`: where they come from. `tunes`: choose as
        many as pay; otherwise all that there are. `most_rows`: a step with more decodes verifies none. `longest`:
        sequences of so many tokens get none. `certain`: for a sequence with a grammar the tokens that it leaves no
        choice about, after those that are known; None: it verifies no drafts. Without it, no sequence with a grammar
        does. `vocab_size`: token ids that the host's proposer may propose are below it."""
        if not 1 <= most <= MOST_DRAFTS:
            raise ValueError(f"a decode verifies 1 to {MOST_DRAFTS} drafts, not {most}")
        self.most = most
        self.has_host = host is not None
        self.has_device = device is not None and device.proposes
        self.needs_following = device is not None and device.needs_following
        self.tuner: Tuner | None = None
        self._host = host
        self._device = device or DeviceDrafts()
        self._tunes = tunes
        self._most_rows = most_rows
        self._longest = longest
        self._certain = certain
        self._vocab_size = vocab_size
        self._structured: dict[int, Request] = {}
        """By row: requests with a grammar."""
        self._predicted: dict[int, PredictedText] = {}
        """By row: the output that a client expects."""
        self._collected = -math.inf
        """When the last step was collected."""
        self._ask_seconds = 0.0
        """What the host's proposer takes for a row."""

    def attach(
        self, requests: RequestTable, in_flight: Sequence[InFlightStep], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The requests whose drafts these are, and the launched steps; called once, before anything else. `clock`: to
        measure the proposer on the host."""
        self._clock = clock
        self._requests = requests
        self._rows = requests.rows
        self._in_flight = in_flight
        self._stats = requests.stats.drafts
        size = requests.rows.size
        if self._tunes:
            self.tuner = Tuner(size, self.most)
        self._offered = np.zeros(size, np.int64)
        """By row: drafts that the device has for it, or at most has while its last draw is in flight."""
        self._made = np.full(size, UNKNOWN)
        """By row: drafts that the device made after the last draw that was collected."""
        self._is_excluded = np.zeros(size, np.bool_)
        """By row: it verifies no drafts."""
        self._asked_in_vain = np.zeros(size, np.int64)
        """By row: times in a row that the host's proposer had no guess."""
        self._last_rows = np.empty(0, np.int64)
        """Rows of the last decodes that were launched…"""
        self._last_drafts = np.empty(0, np.int64)
        """…and how many drafts each verifies."""

    # Requests

    def start(self, request: Request) -> None:
        """The request has a row."""
        row = request.row
        self._offered[row] = self._asked_in_vain[row] = 0
        self._made[row] = UNKNOWN
        if self.tuner is not None:
            self.tuner.start(row)
        is_structured = request.params.structured_outputs is not None
        is_excluded = request.beam is not None or request.source.pooling is not None
        is_excluded |= is_structured and self._certain is None
        self._is_excluded[row] = is_excluded
        if is_structured and not is_excluded:
            self._structured[row] = request
        if request.source.prediction and not is_excluded:
            self._predicted[row] = PredictedText(request.source.prediction)
        if self._host is not None and not is_excluded:
            try:
                self._host.start(request.key, request.tokens(0, request.known), request.source.tenant)
            except Exception:
                self._exclude(request)

    def extend(self, requests: Sequence[Request], tokens: list[int], counts: Sequence[int] | None = None) -> None:
        """Each request has `counts` more tokens, or one."""
        if self._host is None:
            return
        at = 0
        for i, request in enumerate(requests):
            end = at + (1 if counts is None else counts[i])
            if request.row >= 0 and not self._is_excluded[request.row]:
                try:
                    self._host.extend(request.key, tokens[at:end])
                except Exception:
                    self._exclude(request)
            at = end

    def leave(self, request: Request, has_ended: bool = False) -> None:
        """The request is about to leave its row; `has_ended`: for good."""
        row = request.row
        self._structured.pop(row, None)
        self._predicted.pop(row, None)
        if self._host is not None and not self._is_excluded[row]:
            try:
                self._host.leave(request.key, has_ended)
            except Exception:
                self._exclude(request)

    def _exclude(self, request: Request) -> None:
        """Its proposer has failed: the request goes on without drafts."""
        logger.exception("the proposer failed for request %s, which gets no more drafts", request.id)
        self._is_excluded[request.row] = True

    # Planning a step

    def plan(self, builder: StepBuilder, ready: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
        """Choose what the decodes of these rows verify; returns the rows that compute in this step.

        `budget`: tokens of the step. Drafts take at most half of those that the rows leave: prompts need some too.
        """
        most = self._most_drafts(ready)
        if (most < 0).any():
            ready, most = ready[most >= 0], most[most >= 0]
        if self._is_paused(ready):
            most[:] = 0
        self._stats.excluded += len(most) - int(np.count_nonzero(most))
        wanted, builder.proposals = self._choose(ready, most)
        if self._device.keeps_cache and not builder.proposals:
            builder.proposals = int(self._keeps_up(ready))
        drafts = self._find_drafts(builder, ready, wanted)
        if self._predicted:
            self._ask_predictions(builder, ready, most, drafts)
        if self._structured:
            self._ask_grammars(builder, ready, most, drafts)
        self._stats.unavailable += int(np.count_nonzero((drafts == 0) & (wanted > 0)))
        room = max(0, (budget - len(ready)) // 2)
        if int(drafts.sum()) > room:
            drafts = np.clip(room - (np.cumsum(drafts) - drafts), 0, drafts)
        self._rows.widen(ready, 1 + drafts, builder.proposals)
        return ready

    def _most_drafts(self, ready: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drafts that each row may verify; -1: it waits for those in flight."""
        rows = self._rows
        most = np.clip(rows.limit[ready] - rows.bound[ready] - 1, 0, self.most)
        most[self._is_excluded[ready]] = 0
        if self._longest is not None:
            most[rows.bound[ready] + self.most >= self._longest] = 0
        return np.minimum(most, self._requests.states.most_drafts(ready))

    def _is_paused(self, ready: NDArray[np.int64]) -> bool:
        """Whether no row verifies drafts in this step."""
        if self._most_rows is not None and len(ready) > self._most_rows:
            return True
        return not self._device.verifies_with_prompts and self._expects_prompts

    @property
    def _expects_prompts(self) -> bool:
        """Whether the step is likely to have chunks of prompts."""
        return bool(self._requests.prefilling) or (len(self._requests.policy) > 0 and self._rows.free > 0)

    def _keeps_up(self, ready: NDArray[np.int64]) -> bool:
        """Whether the device's proposer runs in a step although no drafts are wanted, because of its cache: for prompts
        always, for decodes if it costs little."""
        if self._expects_prompts or not len(ready) or self.tuner is None:
            return True
        _, _, price = self.tuner.times.prices(len(ready))
        return price < CACHE_COST

    def _choose(self, ready: NDArray[np.int64], most: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Drafts to verify for each row if there are so many, and drafts that the device makes for the next step."""
        if self.tuner is None:
            return most, self.most if self.has_device else 0
        if not len(ready):
            return most, self.tuner.first_proposals() if self.has_device else 0
        if self.has_device and self._host is None:
            offered = np.where(self._made[ready] == 0, 0, self._offered[ready])
            available = np.minimum(most, offered)
        else:
            available = most
        self._stats.unavailable += int(np.count_nonzero((available == 0) & (most > 0)))
        host_seconds = self._ask_seconds if self._host is not None and not self._in_flight else 0.0
        wanted, proposals = self.tuner.choose(ready, available, self.has_device, host_seconds)
        self._stats.unprofitable += int(np.count_nonzero((wanted == 0) & (available > 0)))
        return wanted, proposals

    def _find_drafts(
        self, builder: StepBuilder, ready: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Drafts that there are for each row, at most `wanted`."""
        drafts = np.minimum(wanted, self._offered[ready]) if self.has_device else np.zeros(len(ready), np.int64)
        if self._host is not None and len(ready):
            self._ask_host(builder, ready, wanted, drafts)
        return drafts

    def _ask_host(
        self, builder: StepBuilder, ready: NDArray[np.int64], wanted: NDArray[np.int64], drafts: NDArray[np.int64]
    ) -> None:
        """Ask for runs where the device has fewer drafts than `wanted`, and update `drafts`."""
        rows = self._rows
        drawing = self._draws_in_flight()
        asked = wanted > drafts
        if self.tuner is not None:
            asked &= self._is_turn(ready)
        begin, count = self._clock(), 0
        for i in np.flatnonzero(asked).tolist():
            row, count = int(ready[i]), count + 1
            request = rows.requests[row]
            assert request is not None
            # The row draws at least one token, and at most all that is in flight, before it gets to these.
            run = self._run(request, int(rows.bound[row] - rows.known[row]) + int(wanted[i]))
            left = min(len(run) - int(drawing[row]), int(wanted[i]))
            if left > drafts[i]:
                drafts[i] = left
                builder.drafts[row] = Drafts(row, int(rows.known[row]), run)
            self._asked_in_vain[row] = 0 if left > 0 else self._asked_in_vain[row] + 1
        if count:
            self._ask_seconds += ASK_WEIGHT * ((self._clock() - begin) / count - self._ask_seconds)

    def _run(self, request: Request, most: int) -> list[int]:
        """Tokens that may follow the request's known ones."""
        assert self._host is not None
        try:
            run = [int(token) for token in self._host.propose(request.key, most)[:most]]
            if run and not 0 <= min(run) <= max(run) < self._vocab_size:
                bad = next(token for token in run if not 0 <= token < self._vocab_size)
                raise ValueError(f"token id {bad} is outside the vocabulary of {self._vocab_size}")
            return run
        except Exception:
            self._exclude(request)
            return []

    def _ask_predictions(
        self, builder: StepBuilder, ready: NDArray[np.int64], most: NDArray[np.int64], drafts: NDArray[np.int64]
    ) -> None:
        """Prefer the text that a client expects, for as long as the output is in it: such drafts are mostly right."""
        rows, drawing = self._rows, self._draws_in_flight()
        for i in np.flatnonzero((most > 0) & np.isin(ready, list(self._predicted))).tolist():
            row = int(ready[i])
            request, predicted = rows.requests[row], self._predicted[row]
            assert request is not None
            predicted.read(request.output[predicted.num_read :])
            run = predicted.run(int(rows.bound[row] - rows.known[row]) + int(most[i]))
            left = min(len(run) - int(drawing[row]), int(most[i]))
            if left > 0 and left >= drafts[i]:
                drafts[i] = left
                builder.drafts[row] = Drafts(row, int(rows.known[row]), run)

    def _ask_grammars(
        self, builder: StepBuilder, ready: NDArray[np.int64], most: NDArray[np.int64], drafts: NDArray[np.int64]
    ) -> None:
        """Prefer what grammars leave no choice about, unless the host's proposer has seen it and more. Such drafts pay
        at any price that a draft has."""
        assert self._certain is not None
        drawing = self._draws_in_flight()
        for i in np.flatnonzero(most > 0).tolist():
            row = int(ready[i])
            request = self._structured.get(row)
            if request is None:
                continue
            run = self._certain(request.key)
            if run is None:
                drafts[i] = 0
                builder.drafts.pop(row, None)
                continue
            left = min(len(run) - int(drawing[row]), int(most[i]))
            made = builder.drafts.get(row)
            if left > 0 and (made is None or made.tokens[: len(run)] != run):
                drafts[i] = left
                builder.drafts[row] = Drafts(row, int(self._rows.known[row]), run)

    def _is_turn(self, ready: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Rows that the host's proposer is asked for in this step. If asking takes long, those without a guess of late
        are asked less often."""
        assert self.tuner is not None
        step_seconds, _, _ = self.tuner.times.prices(len(ready))
        if self._ask_seconds * len(ready) < ASK_SHARE * step_seconds:
            return np.ones(len(ready), np.bool_)
        every = 1 << np.minimum(self._asked_in_vain[ready] // 4, 4)
        is_turn: NDArray[np.bool_] = (self._rows.bound[ready] + ready) % every == 0
        return is_turn

    def _draws_in_flight(self) -> NDArray[np.int64]:
        """By row: its draws that are not collected."""
        drawing = np.zeros(self._rows.size, np.int64)
        for step in self._in_flight:
            drawing[step.rows] += self._rows.epoch[step.rows] == step.epochs
        return drawing

    def settle(self, builder: StepBuilder) -> None:
        """The step is planned: it verifies nothing if it has prompts and the device cannot do both."""
        if builder.prompts and not self._device.verifies_with_prompts:
            self._rows.narrow()

    # Results

    def launched(self, plan: StepPlan, step: InFlightStep) -> None:
        """The step is about to be launched."""
        self._offered[step.rows] = plan.proposals
        count = step.num_decodes
        if not count:
            return
        drafts = np.zeros(count, np.int64) if step.widths is None else step.widths[:count] - 1
        self._stats.chosen += np.bincount(drafts, minlength=MAX_WIDTH)
        self._last_rows, self._last_drafts = step.rows[:count].astype(np.int64), drafts

    def collected(self, step: InFlightStep, result: StepResult, now: float) -> None:
        """The step is collected, and its result not applied yet."""
        seconds, self._collected = now - max(step.launched, self._collected), now
        live = self._rows.epoch[step.rows] == step.epochs
        if self.tuner is not None:
            decodes = len(step.requests)
            if decodes and decodes == step.num_decodes and not step.awaits_moves:
                context = int(self._rows.known[step.rows].sum())
                self.tuner.note_step(decodes, step.num_drafts, step.proposals, seconds, context)
        self._note_draws(step, result, live)
        if step.proposals and result.drafts:
            made = np.array([len(drafts) for drafts in result.drafts], np.int64)
            self._made[step.rows[live]] = made[live]
            is_last = live & (self._rows.planned[step.rows] == step.step)
            self._offered[step.rows[is_last]] = made[is_last]

    def _note_draws(self, step: InFlightStep, result: StepResult, live: NDArray[np.bool_]) -> None:
        """Count what was verified, and accepted."""
        if self.tuner is None and step.widths is None:
            return
        valid = np.flatnonzero(live[: step.num_decodes] & (result.counts[: step.num_decodes] > 0))
        rows, accepted = step.rows[valid].astype(np.int64), result.counts[valid].astype(np.int64) - 1
        drafts = np.zeros(len(valid), np.int64) if step.widths is None else step.widths[valid] - 1
        if step.widths is not None:
            self._stats.note(drafts, accepted)
        if self.tuner is not None:
            self.tuner.note_draws(rows, drafts, accepted)

    def forget_in_flight(self) -> None:
        """The steps in flight will not be collected."""

    # What is chosen, and why

    @property
    def stats(self) -> DraftStats:
        """Drafts so far."""
        return self._stats

    def last_choice(self) -> Choice | None:
        """What the tuner chose for the last decodes; None: there is no tuner."""
        if self.tuner is None:
            return None
        return self.tuner.explain(self._last_rows, self._last_drafts, self.has_device)

    def describe(self) -> str:
        """All of it in a line."""
        stats = self._stats
        line = (
            f"drafts: {stats.tokens} verified, {stats.accepted} accepted, {stats.mean_length:.2f} tokens a draw; "
            f"decodes by drafts {stats.chosen[: self.most + 1].tolist()}; without drafts: {stats.excluded} excluded, "
            f"{stats.unavailable} had none, {stats.unprofitable} would not pay"
        )
        if (choice := self.last_choice()) is None:
            return line
        rates = " ".join(f"{rate:.2f}" for rate in choice.acceptance)
        times = " ".join(f"{1000 * seconds:.2f}" for seconds in choice.seconds) or "not measured"
        return (
            f"{line}; chosen now: {choice.drafts:.2f} a decode, {choice.tokens:.2f} tokens expected; acceptance by "
            f"position {rates}; ms a step by drafts {times}"
        )
