"""One step on the device: apply the plan, run the model, draw, write the tokens back, start the copy to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.messages.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from quire.models.base import CausalLM
from quire.worker.batch import DeviceBatch, StepInputs
from quire.worker.extras import RowKind
from quire.worker.graphs import DecodeGraphs
from quire.worker.logits import LogitsProcessor
from quire.worker.logprobs import top_logprobs
from quire.worker.sampler import Sampler

LOGIT_ROWS = 512
"""Logits exist for at most so many rows at a time: a row of a large vocabulary is half a megabyte."""


class HostCopy:
    """Device tensors on their way to the host."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event = None
        if tensors[0].device.type == "cuda":
            tensors = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
            self._event = torch.cuda.Event()
            self._event.record()
        self._tensors = tensors

    def wait(self) -> list[np.ndarray]:
        """The arrays, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


class PendingStep:
    """A launched step; `result` waits for it."""

    def __init__(
        self,
        plan: StepPlan,
        copy: HostCopy,
        logprobs: dict[int, TokenLogprobs],
        prompt_logprobs: dict[int, PromptLogprobs],
    ) -> None:
        self._plan = plan
        self._copy = copy
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def result(self) -> StepResult:
        tokens, stopped, invalid = self._copy.wait()
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
        self, model: CausalLM, batch: DeviceBatch, graphs: DecodeGraphs, processors: Sequence[LogitsProcessor] = ()
    ) -> None:
        self._model = model
        self._graphs = graphs
        self._batch = batch
        self._sampler = Sampler(batch, processors)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start the step. Nothing here waits for the device unless a row asks for logprobs."""
        batch = self._batch
        batch.apply(plan)
        inputs = batch.inputs(plan)
        batch.fork(plan)
        hidden = self._graphs.forward(inputs)
        prompt_logprobs = self._prompt_logprobs(plan, inputs, hidden)
        rows = torch.from_numpy(plan.sample_rows.astype(np.int64)).to(hidden.device, non_blocking=True)
        draws, logprobs = self._draw(plan, inputs, hidden, rows)
        tokens = torch.cat([draw.tokens for draw in draws]) if draws else rows
        invalid = torch.cat([draw.invalid for draw in draws]) if draws else torch.zeros_like(rows, dtype=torch.bool)
        stopped = batch.commit(rows, tokens)
        return PendingStep(plan, HostCopy(tokens, stopped, invalid), logprobs, prompt_logprobs)

    def _draw(self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[list, dict]:
        """Logits only where a token is drawn, in slices."""
        draws, logprobs = [], {}
        samples = torch.from_numpy(plan.samples.astype(np.int64)).to(hidden.device, non_blocking=True)
        for start in range(0, len(plan.samples), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            # A source that forks draws several times from the same logits.
            distinct, repeat = np.unique(plan.samples[part], return_inverse=True)
            if len(distinct) == len(repeat):
                logits = self._model.logits(hidden[inputs.ends[samples[part]] - 1])
            else:
                wanted = torch.from_numpy(distinct.astype(np.int64)).to(hidden.device, non_blocking=True)
                logits = self._model.logits(hidden[inputs.ends[wanted] - 1])
                logits = logits[torch.from_numpy(repeat).to(hidden.device, non_blocking=True)]
            reported = self._raw_logprobs(logits, plan.sample_rows[part])
            draw = self._sampler.draw(logits, rows[part], plan.sample_rows[part], plan.max_context)
            for index, (row_logprobs, count) in reported.items():
                entries = top_logprobs(row_logprobs[None], draw.tokens[index : index + 1], count)
                logprobs[start + index] = entries[0]
            draws.append(draw)
        return draws, logprobs

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
                scores = self._model.logits(predictors[part : part + LOGIT_ROWS]).log_softmax(-1)
                entries += top_logprobs(scores, tokens[part : part + LOGIT_ROWS], extras.params.prompt_logprobs or 0)
            results[i] = PromptLogprobs(start, entries)
        return results
