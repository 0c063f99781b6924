"""One step on the device: apply the plan, run the model, draw, write the tokens back, start the copy to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.messages.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from quire.models.base import CausalLM
from quire.worker.batch import DeviceBatch, StepDraws, StepInputs
from quire.worker.extras import RowKind
from quire.worker.graphs import Graphs
from quire.worker.logits import LogitsProcessor
from quire.worker.logprobs import top_logprobs
from quire.worker.sampler import Sampler

LOGIT_ROWS = 512
"""Logits exist for at most so many rows at a time: a row of a large vocabulary is half a megabyte."""


class PendingStep:
    """A launched step; `result` waits for it."""

    def __init__(
        self,
        plan: StepPlan,
        draws: StepDraws,
        logprobs: dict[int, TokenLogprobs],
        prompt_logprobs: dict[int, PromptLogprobs],
    ) -> None:
        self._plan = plan
        self._draws = draws
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def ready(self) -> bool:
        """Whether the device is done with it."""
        return self._draws.ready()

    def result(self) -> StepResult:
        """What it yielded, once it has."""
        tokens, stopped, invalid = self._draws.wait()
        return StepResult(
            step=self._plan.step,
            tokens=tokens.astype(np.int32),
            counts=np.ones(len(tokens), np.int32),
            stopped=stopped,
            invalid=invalid,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )


class Runner:
    """Runs plans on one device."""

    def __init__(
        self, model: CausalLM, batch: DeviceBatch, graphs: Graphs, processors: Sequence[LogitsProcessor] = ()
    ) -> None:
        self._model = model
        self._graphs = graphs
        self.batch = self._batch = batch
        self._sampler = Sampler(batch, processors)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start the step. Nothing here waits for the device unless a row asks for something out of the ordinary."""
        try:
            return self._launch(plan)
        except BaseException:
            self._batch.is_broken = True
            raise

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> PendingStep:
        batch, graphs = self._batch, self._graphs
        kinds = self._batch.kinds
        padded = graphs.padded_rows(plan)
        batch.apply(plan, padded)
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        if padded and not (kinds[plan.rows] & ~(RowKind.RANDOM | RowKind.PROMPT_LOGPROBS)).any():
            graphs.run_step(padded)
        elif padded:
            hidden = graphs.run_forward(padded)
            logprobs = self._draw(plan, hidden)
        else:
            inputs = batch.inputs(plan)
            batch.fork(plan)
            is_narrow = self._narrows(plan)
            if is_narrow:
                inputs.attention.last = batch.last_tokens(plan, inputs)
            hidden = graphs.forward(inputs)
            prompt_logprobs = self._prompt_logprobs(plan, inputs, hidden)
            logprobs = self._draw(plan, hidden, is_narrow)
        return PendingStep(plan, batch.result(len(plan.samples)), logprobs, prompt_logprobs)

    def _narrows(self, plan: StepPlan) -> bool:
        """Whether the model is to return the hidden states alone that something is drawn from, each once."""
        return (
            getattr(self._model, "narrows", False)
            and plan.num_tokens > len(plan.rows)
            and not plan.forks
            and not (self._batch.kinds[plan.rows] & RowKind.PROMPT_LOGPROBS).any()
        )

    def _draw(self, plan: StepPlan, hidden: torch.Tensor, is_narrow: bool = False) -> dict[int, TokenLogprobs]:
        """Logits only where a token is drawn, in slices. `is_narrow`: there are no other hidden states."""
        logprobs: dict[int, TokenLogprobs] = {}
        picks, rows = self._batch.picks(plan), self._batch.draw_rows(plan)
        for start in range(0, len(plan.samples), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            host_rows = plan.sample_rows[part]
            if is_narrow:
                logits = self._model.logits(hidden[part])
            else:
                logits = self._logits(plan.samples[part], hidden, picks[part])
            kinds = self._batch.kinds[host_rows]
            if not (kinds & RowKind.SPECIAL).any():
                filtered = bool((kinds & RowKind.FILTERED).any())
                if self._batch.draw(logits, rows[part], start, filtered):
                    continue
            logits = logits.float()
            reported = self._raw_logprobs(logits, host_rows)
            draw = self._sampler.draw(logits, rows[part].long(), host_rows, plan.max_context)
            for index, (row_logprobs, count) in reported.items():
                entries = top_logprobs(row_logprobs[None], draw.tokens[index : index + 1], count)
                logprobs[start + index] = entries[0]
            self._batch.commit(draw.tokens, draw.invalid, rows[part].long(), start)
        return logprobs

    def _logits(self, samples: np.ndarray, hidden: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        """A row of logits a draw. A source that forks draws several times from the same ones."""
        distinct, first, repeat = np.unique(samples, return_index=True, return_inverse=True)
        if len(distinct) == len(repeat):
            return self._model.logits(hidden[picks])
        wanted, repeats = self._batch.upload(first, repeat)
        return self._model.logits(hidden[picks[wanted]])[repeats]

    def _raw_logprobs(self, logits: torch.Tensor, host_rows: np.ndarray) -> dict[int, tuple[torch.Tensor, int]]:
        """Log-probabilities before any parameter touches the logits, for the rows that report them."""
        wanted = np.flatnonzero(self._batch.kinds[host_rows] & RowKind.LOGPROBS).tolist()
        return {
            index: (logits[index].log_softmax(-1), self._batch.extras[int(host_rows[index])].params.logprobs or 0)
            for index in wanted
        }

    def _prompt_logprobs(self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor) -> dict[int, PromptLogprobs]:
        """How likely each prompt token of this step was, given those before it.

        A chunk's first token is predicted by the last hidden state of the chunk before, which is kept with the row.
        """
        results: dict[int, PromptLogprobs] = {}
        kinds = self._batch.kinds[plan.rows]
        end = plan.num_decodes
        for i in range(plan.num_decodes, len(plan.rows)):
            begin, end = end, end + int(plan.counts[i])
            if not kinds[i] & RowKind.PROMPT_LOGPROBS:
                continue
            extras = self._batch.extras[int(plan.rows[i])]
            start = int(inputs.positions[begin])
            predictors, tokens = hidden[begin : end - 1], inputs.tokens[begin + 1 : end]
            if start > 0 and extras.last_hidden is not None:
                predictors, tokens = torch.cat([extras.last_hidden, predictors]), inputs.tokens[begin:end]
            else:
                start += 1
            extras.last_hidden = hidden[end - 1 : end].clone()
            inside = max(0, extras.prompt_len - start)  # a preempted row computes its output again too
            predictors, tokens = predictors[:inside], tokens[:inside]
            entries: list[TokenLogprobs] = []
            for part in range(0, len(tokens), LOGIT_ROWS):
                scores = self._model.logits(predictors[part : part + LOGIT_ROWS]).float().log_softmax(-1)
                entries += top_logprobs(scores, tokens[part : part + LOGIT_ROWS], extras.params.prompt_logprobs or 0)
            results[i] = PromptLogprobs(start, entries)
        return results
