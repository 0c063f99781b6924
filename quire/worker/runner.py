"""One step on the device: apply the plan, run the model, draw, write the tokens back, start the copy to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from quire.distributed.pipeline import Pipeline
from quire.messages.plan import PromptLogprobs, StepMasks, StepPlan, StepResult
from quire.models.base import CausalLM
from quire.worker.batch import DeviceBatch, StepDraws, StepInputs
from quire.worker.extras import RowKind
from quire.worker.graphs import Graphs
from quire.worker.logits import LogitsProcessor
from quire.worker.logprobs import Reports
from quire.worker.mixed_steps import MixedShape
from quire.worker.moves import Mover
from quire.worker.pooling import Vectors, pool
from quire.worker.sampler import Sampler

MOVE_SECONDS = 0.0002
"""How often a step that waits for moves alone looks whether they are done."""
LOGIT_ROWS = 512
"""Logits exist for at most so many rows at a time: a row of a large vocabulary is half a megabyte."""
_UNREPORTED = -2


class PendingStep:
    """A launched step; `result` waits for it."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.draws: StepDraws | None = None
        """None while it waits for masks to draw under."""
        self.hidden: torch.Tensor | None = None
        """…and what it then draws from; `is_narrow`: one row a draw."""
        self.is_narrow = False
        self.reports: list[tuple[list[int], Reports]] = []
        """Of draws that say how likely they were: which they are, and what they say."""
        self.prompt_reports: dict[int, tuple[int, Reports]] = {}
        """Of prompt tokens: by index into the plan's rows, the first one's position, and what they say."""
        self.vectors: Vectors | None = None
        self.mover: Mover | None = None
        """Tells of moves that are done; a step without rows is over when it has something to tell."""

    def ready(self) -> bool:
        """Whether the device is done with it."""
        if not len(self.plan.rows):
            return self.mover is None or self.mover.has_news
        return self.draws is None or self.draws.ready()

    def result(self) -> StepResult:
        """What it yielded, once it has."""
        if self.draws is None:
            raise RuntimeError(f"step {self.plan.step} waits for masks: it has drawn nothing")
        if not len(self.plan.rows):
            self._wait_for_moves()
        tokens, stopped, invalid = self.draws.wait()
        return StepResult(
            step=self.plan.step,
            tokens=tokens.astype(np.int32),
            counts=np.ones(len(tokens), np.int32),
            stopped=stopped,
            invalid=invalid,
            logprobs={
                draw: entry
                for draws, reports in self.reports
                for draw, entry in zip(draws, reports.take(), strict=True)
            },
            prompt_logprobs={
                index: PromptLogprobs(start, said.take()) for index, (start, said) in self.prompt_reports.items()
            },
            vectors={} if self.vectors is None else self.vectors.take(),
            moves_done=[] if self.mover is None else self.mover.take_done(),
        )

    def _wait_for_moves(self) -> None:
        while not self.ready():
            time.sleep(MOVE_SECONDS)


class Runner:
    """Runs plans on one device."""

    def __init__(
        self,
        model: CausalLM,
        batch: DeviceBatch,
        graphs: Graphs,
        processors: Sequence[LogitsProcessor] = (),
        pipeline: Pipeline | None = None,
    ) -> None:
        """`pipeline`: the ways to the stages before and after this one, where the model has several."""
        self._pipeline = pipeline
        if pipeline is not None:
            batch.given = pipeline.received
        self._model = model
        self._graphs = graphs
        self.batch = self._batch = batch
        self._sampler = Sampler(batch, processors)
        self.mover: Mover | None = None
        """Copies blocks to host memory and back, where there is such a tier."""
        self._unsupplied: PendingStep | None = None

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start the step. Nothing here waits for the device, unless a row has a logits processor of the user's own."""
        try:
            return self._launch(plan)
        except BaseException:
            self._batch.is_broken = True
            if self._pipeline is not None:
                self._pipeline.send_placeholder()
            raise

    @torch.inference_mode()
    def supply(self, step: PendingStep, masks: StepMasks) -> None:
        """Let a step draw that has waited for this alone."""
        if step is not self._unsupplied or step.hidden is None:
            raise RuntimeError(f"step {step.plan.step} waits for no masks")
        self._unsupplied = None
        try:
            self._finish(step, step.hidden, masks)
        except BaseException:
            self._batch.is_broken = True
            raise
        step.hidden = None

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> PendingStep:
        batch, graphs = self._batch, self._graphs
        kinds = self._batch.kinds
        padded = graphs.padded_rows(plan) if len(plan.rows) else 0
        mixed = graphs.mixed_shape(plan) if len(plan.rows) and not padded and self._can_be_padded(plan) else None
        # Stages pad alike: what travels has the places that the padded plan gives it.
        num_tokens = plan.num_tokens if mixed is None else mixed.num_tokens
        if self._pipeline is not None and len(plan.rows):
            self._pipeline.begin(num_tokens)
        if self._unsupplied is not None and not plan.reset:
            raise RuntimeError(f"plan {plan.step} came while step {self._unsupplied.plan.step} waits for masks")
        self._unsupplied = None
        step = PendingStep(plan)
        step.mover = self.mover
        awaited = plan.moves is not None and plan.moves.awaited
        # What is waited for begins at once, unless the plan is about to be refused: what lies in its slots may be
        # somebody else's then. All else comes after the plan's own copies, which may read what is moved into.
        early = awaited and not (plan.reset or batch.is_broken)
        if early:
            self._start_moves(plan)
        batch.apply(plan if mixed is None else graphs.padded(plan, mixed), padded)
        if plan.reset and self.mover is not None:
            self.mover.forget()
        if not early:
            self._start_moves(plan)
        if awaited and self.mover is not None:
            self.mover.hold_device()
        if not len(plan.rows):
            step.draws = batch.nothing_drawn()
            return step
        if self._pipeline is not None and not self._pipeline.is_last:
            self._pipeline.send(self._pass(plan, padded, mixed)[:num_tokens])
            step.draws = batch.result(0)
            return step
        if padded and not (kinds[plan.rows] & ~(RowKind.RANDOM | RowKind.PROMPT_LOGPROBS)).any():
            graphs.run_step(padded)
            step.draws = batch.result(len(plan.samples))
            return step
        if mixed is not None and not (kinds[plan.rows] & ~RowKind.RANDOM).any():
            graphs.run_mixed_step(mixed)
            step.draws = batch.result(len(plan.samples))
            return step
        if mixed is not None:
            step.is_narrow = True
            hidden = graphs.run_mixed_forward(mixed)[: len(plan.samples)]
        elif padded:
            hidden = graphs.run_forward(padded)
        else:
            inputs = batch.inputs(plan)
            batch.fork(plan.forks)
            step.is_narrow = self._narrows(plan)
            if step.is_narrow:
                inputs.attention.last = batch.last_tokens(plan, inputs)
            hidden = graphs.forward(inputs)
            step.prompt_reports = self._prompt_reports(plan, inputs, hidden)
            step.vectors = pool(plan, batch, hidden, step.is_narrow)
        if (kinds[plan.sample_rows] & RowKind.GUIDED).any():
            step.hidden, self._unsupplied = hidden, step
        else:
            self._finish(step, hidden)
        return step

    def _start_moves(self, plan: StepPlan) -> None:
        if self.mover is not None and plan.moves is not None:
            self.mover.start(plan.step, plan.moves)

    def _pass(self, plan: StepPlan, padded: int, mixed: MixedShape | None) -> torch.Tensor:
        """Hidden states of all tokens, for the stage that follows."""
        if mixed is not None:
            return self._graphs.run_mixed_forward(mixed)
        if padded:
            return self._graphs.run_forward(padded)
        inputs = self._batch.inputs(plan)
        self._batch.fork(plan.forks)
        return self._graphs.forward(inputs)

    def _finish(self, step: PendingStep, hidden: torch.Tensor, masks: StepMasks | None = None) -> None:
        """Draw, and start the copy of what was drawn."""
        step.reports = self._draw(step.plan, hidden, step.is_narrow, masks)
        step.draws = self._batch.result(len(step.plan.samples))

    def _can_be_padded(self, plan: StepPlan) -> bool:
        """Whether nobody asks for more of a step with prompts than what is drawn. New rows are not in `kinds` yet."""
        added = {new.row: RowKind.of(new) for new in plan.add}
        kinds = [added.get(row, self._batch.kinds[row]) for row in plan.rows[plan.num_decodes :].tolist()]
        return not any(kind & (RowKind.PROMPT_LOGPROBS | RowKind.POOLED) for kind in kinds)

    def _narrows(self, plan: StepPlan) -> bool:
        """Whether the model is to return the hidden states alone that something is drawn from, each once."""
        return (
            getattr(self._model, "narrows", False)
            and plan.num_tokens > len(plan.rows)
            and not plan.forks
            and not (self._batch.kinds[plan.rows] & (RowKind.PROMPT_LOGPROBS | RowKind.MEAN)).any()
        )

    def _draw(
        self, plan: StepPlan, hidden: torch.Tensor, is_narrow: bool, masks: StepMasks | None
    ) -> list[tuple[list[int], Reports]]:
        """Logits only where a token is drawn, in slices. `is_narrow`: there are no other hidden states."""
        reports: list[tuple[list[int], Reports]] = []
        picks, rows = self._batch.picks(plan), self._batch.draw_rows(plan)
        for start in range(0, len(plan.samples), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            host_rows = plan.sample_rows[part]
            kinds = self._batch.kinds[host_rows]
            if (kinds & RowKind.POOLED).all():
                nothing = torch.zeros_like(rows[part], dtype=torch.int64)
                self._batch.commit(nothing, nothing.bool(), rows[part].long(), start)
                continue
            if is_narrow:
                logits = self._model.logits(hidden[part])
            else:
                logits = self._logits(plan.samples[part], hidden, picks[part])
            special = bool((kinds & RowKind.SPECIAL).any())
            reported = bool((kinds & RowKind.LOGPROBS).any())
            raw = logits.clone() if reported and (special or masks is not None) else logits
            self._mask(logits, masks, start)
            if special:
                logits = logits.float()
                self._sampler.adjust(logits, rows[part].long(), host_rows, plan.max_context)
            filtered = bool((kinds & RowKind.FILTERED).any())
            if not self._batch.draw(logits, rows[part], start, filtered):
                draw = self._sampler.draw(logits.float(), rows[part].long(), host_rows)
                self._batch.commit(draw.tokens, draw.invalid, rows[part].long(), start)
            if reported:
                reports += self._reports(raw, rows[part], host_rows, start)
        return reports

    def _reports(
        self, logits: torch.Tensor, rows: torch.Tensor, host_rows: np.ndarray, start: int
    ) -> list[tuple[list[int], Reports]]:
        """How likely what these rows drew was before any parameter touched the logits, for those that report it."""
        counts = np.full(len(host_rows), _UNREPORTED)
        for index in np.flatnonzero(self._batch.kinds[host_rows] & RowKind.LOGPROBS).tolist():
            counts[index] = self._batch.extras[int(host_rows[index])].params.logprobs or 0
        tokens = self._batch.last_token[rows.long()]
        found = []
        for count in np.unique(counts[counts != _UNREPORTED]).tolist():
            wanted = np.flatnonzero(counts == count)
            if len(wanted) < len(counts):
                (chosen,) = self._batch.upload(wanted)
                reports = Reports([(logits[chosen], tokens[chosen])], count)
            else:
                reports = Reports([(logits, tokens)], count)
            found.append(((wanted + start).tolist(), reports))
        return found

    def _mask(self, logits: torch.Tensor, masks: StepMasks | None, start: int) -> None:
        """Take away what the rows of this slice may not draw, in place."""
        if masks is not None:
            inside = (masks.draws >= start) & (masks.draws < start + len(logits))
            if inside.any():
                self._batch.mask(logits, masks.draws[inside] - start, masks.bits[inside])

    def _logits(self, samples: np.ndarray, hidden: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        """A row of logits a draw. A source that forks draws several times from the same ones."""
        distinct, first, repeat = np.unique(samples, return_index=True, return_inverse=True)
        if len(distinct) == len(repeat):
            return self._model.logits(hidden[picks])
        wanted, repeats = self._batch.upload(first, repeat)
        return self._model.logits(hidden[picks[wanted]])[repeats]

    def _prompt_reports(
        self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor
    ) -> dict[int, tuple[int, Reports]]:
        """How likely each prompt token of this step was, given those before it.

        A chunk's first token is predicted by the last hidden state of the chunk before, which is kept with the row.
        """
        results: dict[int, tuple[int, Reports]] = {}
        kinds = self._batch.kinds[plan.rows]
        ends = np.cumsum(plan.counts)
        for i in np.flatnonzero(kinds & RowKind.PROMPT_LOGPROBS).tolist():
            if i < plan.num_decodes:
                continue
            begin, end = int(ends[i] - plan.counts[i]), int(ends[i])
            extras = self._batch.extras[int(plan.rows[i])]
            start, extras.num_seen = extras.num_seen, extras.num_seen + end - begin
            predictors, tokens = hidden[begin : end - 1], inputs.tokens[begin + 1 : end]
            if start > 0 and extras.last_hidden is not None:
                predictors, tokens = torch.cat([extras.last_hidden, predictors]), inputs.tokens[begin:end]
            else:
                start += 1
            extras.last_hidden = hidden[end - 1 : end].clone()
            inside = max(0, extras.prompt_len - start)  # a preempted row computes its output again too
            predictors, tokens = predictors[:inside], tokens[:inside]
            parts = (slice(at, at + LOGIT_ROWS) for at in range(0, len(tokens), LOGIT_ROWS))
            scores = ((self._model.logits(predictors[part]), tokens[part]) for part in parts)
            results[i] = start, Reports(scores, extras.params.prompt_logprobs or 0)
        return results
