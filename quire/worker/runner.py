"""One step on the device: apply the plan, run the model, sample, write the tokens back, start the copy to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.adapters.device import DeviceAdapters
from quire.distributed.pipeline import Pipeline
from quire.messages.plan import MAX_WIDTH, PromptLogprobs, StepMasks, StepPlan, StepResult, TokenLogprobs
from quire.models.base import CausalLM
from quire.speculative.device import DeviceProposer, ProposalStep
from quire.worker.batch import DeviceBatch, Drawn, StepDraws, StepInputs
from quire.worker.encoded_items import EncodedItems
from quire.worker.extras import RowKind
from quire.worker.logits import LogitsProcessor
from quire.worker.logprobs import LOGIT_ROWS, AnyPending, PendingLogprobs, prompt_logprobs, sampled_logprobs
from quire.worker.moves import Mover
from quire.worker.paths import StepPath, propose
from quire.worker.pooling import PendingVectors, pool
from quire.worker.sampler import Sampler

LOAD_POLL_SECONDS = 0.005
"""How long a step that only waits for adapters takes at most."""
MOVE_POLL_SECONDS = 0.0002
"""How often a step that only waits for block copies checks whether they are done."""


class PendingStep:
    """A launched step; `result` waits for it."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.draws: StepDraws | None = None
        """None while the step waits for masks to sample under…"""
        self.hidden: torch.Tensor | None = None
        """…and the hidden states it then samples from; `last_only`: one row per draw, not one per token."""
        self.last_only = False
        self.inputs: StepInputs | None = None
        """Inputs of a step whose drafts are verified, or that proposes some, outside of a captured graph."""
        self.logprobs: list[tuple[list[int], AnyPending]] = []
        """(places, their logprobs) of the draws that request them."""
        self.prompt_logprobs: dict[int, tuple[int, PendingLogprobs]] = {}
        """By index into the plan's rows: the first prompt token's position, and the logprobs."""
        self.vectors: PendingVectors | None = None
        self.encode_errors: list[tuple[int, str]] = []
        self.mover: Mover | None = None
        """Reports finished block copies; a step without rows is done when there is one to report."""
        self.adapters: DeviceAdapters | None = None
        """Reports loads of adapters that have ended."""
        self.launched = time.monotonic()

    def ready(self) -> bool:
        """Whether the device is done with it."""
        if not len(self.plan.rows):
            return self._has_news()
        return self.draws is None or self.draws.ready()

    def _has_news(self) -> bool:
        """Whether a step without rows, which waits for copies of blocks and loads of adapters, has one to report. One
        that waits for adapters ends soon in any case, so that other requests can start."""
        if self.adapters is not None and self.adapters.is_loading:
            return self.adapters.can_report or time.monotonic() - self.launched >= LOAD_POLL_SECONDS
        return self.mover is None or self.mover.can_report

    def result(self) -> StepResult:
        """What it yielded; waits until it is done."""
        if self.draws is None:
            raise RuntimeError(f"step {self.plan.step} waits for masks: it has not sampled")
        if not len(self.plan.rows):
            while not self.ready():
                time.sleep(MOVE_POLL_SECONDS)
        drawn = self.draws.wait()
        tokens, counts, logprobs = drawn.tokens, drawn.counts, self._take_logprobs()
        if counts is None:
            counts = np.ones(len(tokens), np.int32)
        else:
            is_yielded = self.plan.place_offsets < np.repeat(counts, self.plan.widths)
            index = (np.cumsum(is_yielded) - 1).tolist()
            tokens = tokens[is_yielded]
            logprobs = {index[place]: entry for place, entry in logprobs.items() if is_yielded[place]}
        return StepResult(
            step=self.plan.step,
            tokens=tokens.astype(np.int32),
            counts=counts.astype(np.int32),
            stopped=drawn.stopped,
            invalid=drawn.invalid,
            logprobs=logprobs,
            prompt_logprobs={
                index: PromptLogprobs(start, pending.take()) for index, (start, pending) in self.prompt_logprobs.items()
            },
            vectors={} if self.vectors is None else self.vectors.take(),
            drafts=_lists(drawn),
            encode_errors=self.encode_errors,
            moves_done=[] if self.mover is None else self.mover.take_done(),
            adapters_done=[] if self.adapters is None else self.adapters.take_done(),
        )

    def _take_logprobs(self) -> dict[int, TokenLogprobs]:
        """By place."""
        return {
            place: entry
            for places, pending in self.logprobs
            for place, entry in zip(places, pending.take(), strict=True)
        }


def _lists(drawn: Drawn) -> list[list[int]]:
    """The drafts that were proposed, a list for each draw."""
    if drawn.drafts is None or drawn.num_drafts is None:
        return []
    counts = drawn.num_drafts.tolist()
    return [row[:count] for row, count in zip(drawn.drafts.tolist(), counts, strict=True)]


class Runner:
    """Runs plans on one device."""

    def __init__(
        self,
        model: CausalLM,
        batch: DeviceBatch,
        paths: Sequence[StepPath],
        processors: Sequence[LogitsProcessor] = (),
        pipeline: Pipeline | None = None,
        proposer: DeviceProposer | None = None,
        items: EncodedItems | None = None,
    ) -> None:
        """`paths`: in order of preference, the last of which takes every plan. `pipeline`: the links to the previous
        and next pipeline stage, if there are several. `proposer`: makes drafts on the device. `items`: encoded
        images, for a model that reads some."""
        self._items = items
        self._pipeline = pipeline
        self._proposer = proposer
        self._model = model
        self._classify = getattr(model, "classify", None)
        """A classifier's head."""
        self.paths = paths
        self.batch = self._batch = batch
        self._sampler = Sampler(batch, processors)
        self.mover: Mover | None = None
        """Copies blocks to host memory and back, if there is a host tier."""
        self._unsupplied: PendingStep | None = None

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start the step. Does not wait for the device, unless a row has a logits processor of the user's own."""
        try:
            return self._launch(plan)
        except BaseException:
            self._batch.is_broken = True
            if self._pipeline is not None:
                self._pipeline.send_placeholder()
            raise

    @torch.inference_mode()
    def supply(self, step: PendingStep, masks: StepMasks) -> None:
        """Give a step the masks it waits for, so that it samples."""
        if step is not self._unsupplied or step.hidden is None:
            raise RuntimeError(f"step {step.plan.step} waits for no masks")
        self._unsupplied = None
        try:
            self._finish(step, step.hidden, masks)
        except BaseException:
            self._batch.is_broken = True
            raise

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> PendingStep:
        if self._items is None or not (plan.encode or plan.encoded or plan.freed or plan.reset):
            return self._launch_step(plan)
        errors = self._items.apply(plan)
        step = self._launch_step(plan)
        step.encode_errors = errors
        return step

    def _launch_step(self, plan: StepPlan) -> PendingStep:
        adapters = self._batch.adapters
        if adapters is not None:
            adapters.begin(plan)
            adapters.slots.start(plan.adapters)
        if not len(plan.rows):
            step = self._start(plan, plan)
            self._batch.kv.copy(plan.snapshots)
            step.draws = self._batch.nothing_drawn()
            return step
        path, shape = self._choose_path(plan)
        padded, rows = path.pad(plan, shape)
        if self._pipeline is not None:  # stages pad alike: hidden states travel with the padded plan's layout
            self._pipeline.begin(padded.num_tokens)
        if adapters is not None and adapters.is_active:
            adapters.lay_out(padded)
        step = self._start(plan, padded, rows)
        output = path.run(plan, shape)
        if not plan.num_drafts:
            self._batch.kv.copy(plan.snapshots)
        if self._pipeline is not None and not self._pipeline.is_last:
            assert output.hidden is not None
            self._pipeline.send(output.hidden[: padded.num_tokens])
            step.draws = self._batch.result(0)
            return step
        if output.hidden is None:
            if plan.num_drafts:
                self._batch.kv.copy(plan.snapshots)
            step.draws = self._batch.result(len(plan.samples), proposed=plan.proposals > 0)
            return step
        step.last_only = output.last_only
        step.inputs = output.inputs
        if output.inputs is not None and plan.num_decodes < len(plan.rows):
            step.prompt_logprobs = prompt_logprobs(plan, self._batch, output.inputs, output.hidden, self._logits_of)
            step.vectors = pool(plan, self._batch, output.hidden, output.last_only, self._classify)
        if (self._batch.kinds[plan.sample_rows] & RowKind.STRUCTURED).any():
            step.hidden, self._unsupplied = output.hidden, step
        else:
            self._finish(step, output.hidden)
        return step

    def _choose_path(self, plan: StepPlan) -> tuple[StepPath, Any]:
        """The first path that takes the plan, and the shape it runs it in."""
        for path in self.paths:
            if (shape := path.fit(plan)) is not None:
                return path, shape
        raise RuntimeError(f"no path takes plan {plan.step}")

    def _start(self, plan: StepPlan, padded: StepPlan, rows: int = 0) -> PendingStep:
        """Apply the plan to the batch, as `padded` and at `rows` rows, and start its block copies."""
        if self._unsupplied is not None and not plan.reset:
            raise RuntimeError(f"got plan {plan.step} while step {self._unsupplied.plan.step} waits for masks")
        self._unsupplied = None
        step = PendingStep(plan)
        step.mover = self.mover
        step.adapters = None if self._batch.adapters is None else self._batch.adapters.slots
        awaited = plan.moves is not None and plan.moves.awaited
        # Copies that the step waits for start at once, unless the plan is about to be refused: its slots may belong to
        # other blocks by then. All others come after the plan's own copies, which may read the blocks they write to.
        early = awaited and not (plan.reset or self._batch.is_broken)
        if early:
            self._start_moves(plan)
        self._batch.apply(padded, rows)
        if plan.reset and self.mover is not None:
            self.mover.forget()
        if not early:
            self._start_moves(plan)
        if awaited and self.mover is not None:
            self.mover.make_steps_wait()
        return step

    def _start_moves(self, plan: StepPlan) -> None:
        if self.mover is not None and plan.moves is not None:
            self.mover.start(plan.step, plan.moves)

    def _finish(self, step: PendingStep, hidden: torch.Tensor, masks: StepMasks | None = None) -> None:
        """Sample, verify drafts and propose new ones, and start the copy of the tokens."""
        plan = step.plan
        step.logprobs = self._sample(plan, hidden, step.last_only, masks)
        counts = None
        if plan.num_drafts:
            counts = self._batch.verify(plan)
            self._update_states(step, counts[: plan.num_decodes])
        if plan.proposals and self._proposer is not None and step.inputs is not None:
            self._propose(step.inputs, plan, None if step.last_only else hidden, counts)
        step.draws = self._batch.result(len(plan.samples), proposed=plan.proposals > 0)
        step.hidden = step.inputs = None

    def _update_states(self, step: PendingStep, counts: torch.Tensor) -> None:
        """Repeat the updates of recurrent states by the tokens that count, and take snapshots of the outcome."""
        replay = None if step.inputs is None else step.inputs.attention[0].replay
        if replay is not None:
            replay.commit(counts.to(torch.int32))
        self._batch.kv.copy(step.plan.snapshots)

    def _propose(
        self, inputs: StepInputs, plan: StepPlan, hidden: torch.Tensor | None, counts: torch.Tensor | None
    ) -> None:
        """Let the proposer make drafts. `counts`: tokens each draw yielded, None: one each."""
        assert self._proposer is not None
        batch, picks = self._batch, self._batch.picks(plan)
        following = inputs.tokens.roll(-1)
        following[picks] = batch.drawn(plan)
        if len(plan.following):
            ends = np.cumsum(plan.counts)[plan.num_decodes :] - 1
            is_given = plan.following >= 0
            places, tokens = batch.upload(ends[is_given], plan.following[is_given])
            following[places] = tokens
        rows, first = batch.upload(plan.sample_rows, np.cumsum(plan.widths) - plan.widths)
        ends_of = picks[first] if counts is None else picks[first] + counts - 1
        propose(
            self._proposer,
            ProposalStep(
                tokens=inputs.tokens,
                positions=inputs.positions,
                following=following,
                attention=inputs.attention,
                hidden=hidden,
                features=inputs.features,
                rows=rows,
                ends=ends_of,
                count=plan.proposals,
                batch=batch,
                kv=batch.kv.proposer_layers,
                lay_out=lambda distance: batch.ahead(rows, distance, plan.max_context + MAX_WIDTH),
            ),
        )

    def _sample(
        self, plan: StepPlan, hidden: torch.Tensor, last_only: bool, masks: StepMasks | None
    ) -> list[tuple[list[int], AnyPending]]:
        """Logits only where a token is drawn, in slices. `last_only`: `hidden` has one row per draw."""
        logprobs: list[tuple[list[int], AnyPending]] = []
        picks, rows = self._batch.picks(plan), self._batch.draw_rows(plan)
        place_rows, host_picks = plan.place_rows, plan.picks
        for start in range(0, len(place_rows), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            host_rows = place_rows[part]
            kinds = self._batch.kinds[host_rows]
            if (kinds & RowKind.POOLED).all():
                nothing = torch.zeros_like(rows[part], dtype=torch.int64)
                self._keep(plan, nothing, nothing.bool(), rows[part], start)
                continue
            if last_only:
                logits = self._logits_of(hidden[part], host_rows)
            elif self._batch.adapters is not None and self._batch.adapters.tokens is not None:
                logits = self._logits_of(hidden[picks[part]], host_rows)
            else:
                logits = self._logits(host_picks[part], hidden, picks[part])
            special = bool((kinds & RowKind.SPECIAL).any())
            reported = bool((kinds & RowKind.LOGPROBS).any())
            raw = logits.clone() if reported and (special or masks is not None) else logits
            self._mask(logits, masks, start)
            if special:
                logits = logits.float()
                owners = rows[part].long()
                lengths = self._batch.lengths(plan, part, owners)
                self._sampler.adjust(logits, owners, lengths, host_rows, plan.max_context)
            filtered = bool((kinds & RowKind.FILTERED).any())
            by_ratio = plan.num_drafts > 0 and self._batch.draft_probs is not None
            if by_ratio or not self._batch.draw(plan, logits, rows[part], start, filtered):
                owners = rows[part].long()
                draw = self._sampler.draw(logits.float(), owners, self._batch.lengths(plan, part, owners), host_rows)
                self._keep(plan, draw.tokens, draw.invalid, rows[part], start)
            if reported:
                logprobs += sampled_logprobs(self._batch, raw, rows[part], host_rows, start)
        return logprobs

    def _keep(
        self, plan: StepPlan, tokens: torch.Tensor, invalid: torch.Tensor, rows: torch.Tensor, start: int
    ) -> None:
        """Write drawn tokens back, or keep them until drafts are verified."""
        if plan.num_drafts:
            self._batch.place(tokens, invalid, start)
        else:
            self._batch.commit(tokens, invalid, rows.long(), start)

    def _mask(self, logits: torch.Tensor, masks: StepMasks | None, start: int) -> None:
        """Apply the masks of this slice's rows, in place."""
        if masks is not None:
            inside = (masks.draws >= start) & (masks.draws < start + len(logits))
            if inside.any():
                self._batch.mask(logits, masks.draws[inside] - start, masks.bits[inside])

    def _logits_of(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Logits of hidden states [n, hidden size], of the rows [n]."""
        adapters = self._batch.adapters
        if adapters is None or adapters.tokens is None:
            return self._model.logits(hidden)
        adapters.enter_rows(rows)
        try:
            return self._model.logits(hidden)
        finally:
            adapters.leave()

    def _logits(self, host_picks: np.ndarray, hidden: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        """A row of logits per place. A source that forks draws several times from the same ones."""
        distinct, first, repeat = np.unique(host_picks, return_index=True, return_inverse=True)
        if len(distinct) == len(repeat):
            return self._model.logits(hidden[picks])
        wanted, repeats = self._batch.upload(first, repeat)
        return self._model.logits(hidden[picks[wanted]])[repeats]
