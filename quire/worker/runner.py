"""One step on the device: apply the plan, run the model, sample, write the tokens back, start the copy to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.distributed.pipeline import Pipeline
from quire.messages.plan import PromptLogprobs, StepMasks, StepPlan, StepResult
from quire.models.base import CausalLM
from quire.worker.batch import DeviceBatch, StepDraws
from quire.worker.extras import RowKind
from quire.worker.logits import LogitsProcessor
from quire.worker.logprobs import LOGIT_ROWS, PendingLogprobs, prompt_logprobs, sampled_logprobs
from quire.worker.moves import Mover
from quire.worker.paths import StepPath
from quire.worker.pooling import PendingVectors, pool
from quire.worker.sampler import Sampler

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
        self.logprobs: list[tuple[list[int], PendingLogprobs]] = []
        """(draws, their logprobs) of the draws that request them."""
        self.prompt_logprobs: dict[int, tuple[int, PendingLogprobs]] = {}
        """By index into the plan's rows: the first prompt token's position, and the logprobs."""
        self.vectors: PendingVectors | None = None
        self.mover: Mover | None = None
        """Reports finished block copies; a step without rows is done when there is one to report."""

    def ready(self) -> bool:
        """Whether the device is done with it."""
        if not len(self.plan.rows):
            return self.mover is None or self.mover.can_report
        return self.draws is None or self.draws.ready()

    def result(self) -> StepResult:
        """What it yielded; waits until it is done."""
        if self.draws is None:
            raise RuntimeError(f"step {self.plan.step} waits for masks: it has not sampled")
        if not len(self.plan.rows):
            while not self.ready():
                time.sleep(MOVE_POLL_SECONDS)
        tokens, stopped, invalid = self.draws.wait()
        return StepResult(
            step=self.plan.step,
            tokens=tokens.astype(np.int32),
            counts=np.ones(len(tokens), np.int32),
            stopped=stopped,
            invalid=invalid,
            logprobs={
                draw: entry
                for draws, pending in self.logprobs
                for draw, entry in zip(draws, pending.take(), strict=True)
            },
            prompt_logprobs={
                index: PromptLogprobs(start, pending.take()) for index, (start, pending) in self.prompt_logprobs.items()
            },
            vectors={} if self.vectors is None else self.vectors.take(),
            moves_done=[] if self.mover is None else self.mover.take_done(),
        )


class Runner:
    """Runs plans on one device."""

    def __init__(
        self,
        model: CausalLM,
        batch: DeviceBatch,
        paths: Sequence[StepPath],
        processors: Sequence[LogitsProcessor] = (),
        pipeline: Pipeline | None = None,
    ) -> None:
        """`paths`: in order of preference, the last of which takes every plan. `pipeline`: the links to the previous
        and next pipeline stage, if there are several."""
        self._pipeline = pipeline
        self._model = model
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
        step.hidden = None

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> PendingStep:
        if not len(plan.rows):
            step = self._start(plan, plan)
            self._batch.kv.copy(plan.snapshots)
            step.draws = self._batch.nothing_drawn()
            return step
        path, shape = self._choose_path(plan)
        padded, rows = path.pad(plan, shape)
        if self._pipeline is not None:  # stages pad alike: hidden states travel with the padded plan's layout
            self._pipeline.begin(padded.num_tokens)
        step = self._start(plan, padded, rows)
        output = path.run(plan, shape)
        self._batch.kv.copy(plan.snapshots)
        if self._pipeline is not None and not self._pipeline.is_last:
            assert output.hidden is not None
            self._pipeline.send(output.hidden[: padded.num_tokens])
            step.draws = self._batch.result(0)
            return step
        if output.hidden is None:
            step.draws = self._batch.result(len(plan.samples))
            return step
        step.last_only = output.last_only
        if output.inputs is not None:
            step.prompt_logprobs = prompt_logprobs(plan, self._batch, output.inputs, output.hidden, self._model.logits)
            step.vectors = pool(plan, self._batch, output.hidden, output.last_only)
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
        """Sample, and start the copy of the tokens."""
        step.logprobs = self._sample(step.plan, hidden, step.last_only, masks)
        step.draws = self._batch.result(len(step.plan.samples))

    def _sample(
        self, plan: StepPlan, hidden: torch.Tensor, last_only: bool, masks: StepMasks | None
    ) -> list[tuple[list[int], PendingLogprobs]]:
        """Logits only where a token is drawn, in slices. `last_only`: `hidden` has one row per draw."""
        logprobs: list[tuple[list[int], PendingLogprobs]] = []
        picks, rows = self._batch.picks(plan), self._batch.draw_rows(plan)
        for start in range(0, len(plan.samples), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            host_rows = plan.sample_rows[part]
            kinds = self._batch.kinds[host_rows]
            if (kinds & RowKind.POOLED).all():
                nothing = torch.zeros_like(rows[part], dtype=torch.int64)
                self._batch.commit(nothing, nothing.bool(), rows[part].long(), start)
                continue
            if last_only:
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
                logprobs += sampled_logprobs(self._batch, raw, rows[part], host_rows, start)
        return logprobs

    def _mask(self, logits: torch.Tensor, masks: StepMasks | None, start: int) -> None:
        """Apply the masks of this slice's rows, in place."""
        if masks is not None:
            inside = (masks.draws >= start) & (masks.draws < start + len(logits))
            if inside.any():
                self._batch.mask(logits, masks.draws[inside] - start, masks.bits[inside])

    def _logits(self, samples: np.ndarray, hidden: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        """A row of logits per draw. A source that forks draws several times from the same ones."""
        distinct, first, repeat = np.unique(samples, return_index=True, return_inverse=True)
        if len(distinct) == len(repeat):
            return self._model.logits(hidden[picks])
        wanted, repeats = self._batch.upload(first, repeat)
        return self._model.logits(hidden[picks[wanted]])[repeats]
