"""The ways a step runs on a device: kernel by kernel (here), or as a captured graph.

`Runner` takes the first path that fits a plan: a captured pure decode, a captured step with prompts (both in
`cuda_graphs.py` on a GPU), then `EagerPath`, which takes every plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from quire.kernels.base import Ops
from quire.layers.attention.base import AttentionInputs
from quire.messages.plan import StepPlan
from quire.models.base import CausalLM
from quire.worker.batch import DeviceBatch, StepInputs, as_siblings
from quire.worker.extras import RowKind

TAPE_ROWS = 32
"""The largest decode that is recorded on a CPU: with more rows a step is long enough for Python to keep up."""


class DecodeShape(NamedTuple):
    """The key of a captured decode."""

    rows: int
    width: int
    """Query tokens per row."""
    grouped: bool
    """Whether attention reads the blocks of prefix groups once for all their rows."""


@dataclass
class PathOutput:
    """What a path leaves for the runner to do."""

    hidden: torch.Tensor | None
    """Hidden states, valid until the next step; None: the step has sampled its tokens already."""
    last_only: bool = False
    """`hidden` has one row per draw, not one per token."""
    inputs: StepInputs | None = None
    """An eager step's inputs, for prompt logprobs and pooling; captured steps have neither."""


class StepPath(Protocol):
    """One way to run a step: `fit` before the plan is applied to the batch, `run` after."""

    def fit(self, plan: StepPlan) -> Any:
        """The shape this path runs the plan in; None if it does not take the plan."""
        ...

    def pad(self, plan: StepPlan, shape: Any) -> tuple[StepPlan, int]:
        """The plan as the batch is to apply it, and the rows the batch pads it to (0: none)."""
        ...

    def run(self, plan: StepPlan, shape: Any) -> PathOutput:
        """Run the applied plan. On a pipeline stage that is not the last: hidden states of all tokens."""
        ...


class EagerPath:
    """Launches the step kernel by kernel. Takes every plan."""

    def __init__(self, model: CausalLM, batch: DeviceBatch, is_last_stage: bool) -> None:
        self._model = model
        self._batch = batch
        self._is_last_stage = is_last_stage

    def fit(self, plan: StepPlan) -> int:
        return len(plan.rows)

    def pad(self, plan: StepPlan, shape: int) -> tuple[StepPlan, int]:
        return plan, 0

    def run(self, plan: StepPlan, shape: int) -> PathOutput:
        inputs = self._batch.inputs(plan)
        self._batch.fork(plan.forks)
        last_only = self._is_last_only(plan)
        if last_only:
            inputs.attention[0].last = self._batch.last_tokens(plan, inputs)
        return PathOutput(forward(self._model, self._batch, inputs), last_only, inputs)

    def _is_last_only(self, plan: StepPlan) -> bool:
        """Whether the model should return only the hidden states that tokens are sampled from, each once."""
        return (
            self._is_last_stage
            and self._model.supports_last_tokens
            and plan.num_tokens > len(plan.rows)
            and not plan.forks
            and not (self._batch.kinds[plan.rows] & (RowKind.PROMPT_LOGPROBS | RowKind.MEAN)).any()
        )


@dataclass
class RecordedPass:
    """A forward pass over fixed buffers: fill them, call `replay`, read `hidden`."""

    inputs: StepInputs
    hidden: torch.Tensor
    replay: Callable[[], None]

    def run(self, step: StepInputs) -> torch.Tensor:
        """The step's hidden states; the next run overwrites them."""
        self.inputs.tokens.copy_(step.tokens)
        self.inputs.positions.copy_(step.positions)
        for own, given in zip(self.inputs.attention, step.attention, strict=True):
            own.slots.copy_(given.slots)
            own.context_lens.copy_(given.context_lens)
            own.block_tables[:, : given.block_tables.shape[1]].copy_(given.block_tables)
        self.replay()
        return self.hidden


class TapeDecodePath:
    """Pure decodes on a device that records forward passes (`Ops.capture`): the CPU's tape.

    A small decode is bound by the host: hundreds of short kernels, each called from Python. Its shape depends only on
    the number of rows, so the forward pass is recorded once over fixed buffers, and later steps fill the buffers and
    replay it. Inputs and sampling run as in an eager step.
    """

    def __init__(self, model: CausalLM, batch: DeviceBatch, ops: Ops, width: int = 1) -> None:
        """`width`: query tokens per row."""
        require_single_query(width)
        self._model = model
        self._batch = batch
        self._ops = ops
        self._width = width
        self._enabled = True
        self._passes: dict[tuple[DecodeShape, int], RecordedPass] = {}

    def fit(self, plan: StepPlan) -> DecodeShape | None:
        rows = len(plan.rows)
        if not self._enabled or rows > TAPE_ROWS or plan.num_decodes < rows:
            return None
        return DecodeShape(rows, self._width, grouped=False)

    def pad(self, plan: StepPlan, shape: DecodeShape) -> tuple[StepPlan, int]:
        return plan, 0

    def run(self, plan: StepPlan, shape: DecodeShape) -> PathOutput:
        inputs = self._batch.inputs(plan)
        self._batch.fork(plan.forks)
        key = (shape, torch.get_num_threads())  # a recorded call has its number of threads in it
        recorded = self._passes.get(key)
        return PathOutput(self._record(key, inputs) if recorded is None else recorded.run(inputs))

    def _record(self, key: tuple[DecodeShape, int], step: StepInputs) -> torch.Tensor:
        # Hidden states of the previous pipeline stage always arrive in the same buffer.
        groups = as_siblings([self._own_inputs(group, given) for group, given in enumerate(step.attention)])
        inputs = StepInputs(step.tokens.clone(), step.positions.clone(), groups, step.hidden)
        hidden, replay = self._ops.capture(functools.partial(forward, self._model, self._batch, inputs))
        if replay is None:
            self._enabled = False  # this model, or this device, cannot be recorded
        else:
            self._passes[key] = RecordedPass(inputs, hidden, replay)
        return hidden

    def _own_inputs(self, group: int, given: AttentionInputs) -> AttentionInputs:
        """Buffers of the pass for one cache group, filled from the first step; tables as wide as they can get."""
        width = self._batch.cache_groups[group].pages or self._batch.block_table.shape[1]
        tables = given.block_tables.new_zeros(given.num_rows, width)
        tables[:, : given.block_tables.shape[1]] = given.block_tables
        return replace(
            given,
            slots=given.slots.clone(),
            query_starts=given.query_starts.clone(),
            context_lens=given.context_lens.clone(),
            block_tables=tables,
            plans={},
            common={},
        )


def forward(model: CausalLM, batch: DeviceBatch, step: StepInputs) -> torch.Tensor:
    """Hidden states of a step's tokens."""
    return model.forward(step.tokens, step.positions, batch.kv.layers, step.attention[0], step.hidden)


def require_single_query(width: int) -> None:
    """Refuse captured decodes of several query tokens per row."""
    if width != 1:
        raise NotImplementedError(f"captured decodes have 1 query token per row, got width {width}")
