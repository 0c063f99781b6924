"""The ways a step runs on a device: kernel by kernel (here), or as a captured graph.

`Runner` takes the first path that fits a plan: a captured pure decode, a captured step with prompts (both in
`cuda_graphs.py` on a GPU), then `EagerPath`, which takes every plan.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from quire.kernels.base import Ops
from quire.layers.attention.base import AttentionInputs, FeatureRequest
from quire.messages.plan import MAX_WIDTH, StepPlan
from quire.models.base import CausalLM
from quire.speculative.device import DeviceProposer, ProposalStep
from quire.worker.batch import DeviceBatch, StepInputs, as_siblings
from quire.worker.encoded_items import EncodedItems
from quire.worker.extras import RowKind

logger = logging.getLogger(__name__)

TAPE_ROWS = 32
"""The largest decode that is recorded on a CPU: with more rows a step is long enough for Python to keep up."""


TAPES = 256
"""Most recorded passes; decodes that verify drafts have many shapes."""


class TapeShape(NamedTuple):
    """The key of a recorded decode."""

    rows: int
    tokens: int
    width: int
    """Most query tokens of a row."""
    threads: int
    """A recorded call has its number of threads in it."""
    adapters: int = -1
    """With adapters: the version of their slots (`DeviceAdapters.version`)."""


class DecodeShape(NamedTuple):
    """The key of a captured decode."""

    rows: int
    grouped: bool
    """Whether attention reads the blocks of prefix groups once for all their rows."""
    proposals: int = 0
    """Drafts that the proposer on the device makes for each row."""
    adapted: bool = False
    """Whether rows may have LoRA adapters."""


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

    def __init__(
        self,
        model: CausalLM,
        batch: DeviceBatch,
        is_last_stage: bool,
        proposer: DeviceProposer | None = None,
        items: EncodedItems | None = None,
    ) -> None:
        """`items`: encoded images, for a model that reads some."""
        self._model = model
        self._batch = batch
        self._is_last_stage = is_last_stage
        self._proposer = proposer
        self._items = items

    def fit(self, plan: StepPlan) -> int:
        return len(plan.rows)

    def pad(self, plan: StepPlan, shape: int) -> tuple[StepPlan, int]:
        return plan, 0

    def run(self, plan: StepPlan, shape: int) -> PathOutput:
        inputs = self._batch.inputs(plan)
        self._batch.fork(plan.forks)
        if plan.splices and self._items is not None:
            self._items.splice(plan, inputs)
        if plan.visible:
            see_spans(plan, inputs, self._batch)
        last_only = inputs.attention[0].deepstack is None and self._is_last_only(plan)
        if last_only:
            inputs.attention[0].last = self._batch.last_tokens(plan, inputs)
        if plan.proposals:
            request_features(inputs, self._proposer)
        hidden = forward(self._model, self._batch, inputs)
        inputs.attention[0].deepstack = None  # a proposer's layers are not those that it is for
        return PathOutput(hidden, last_only, inputs)

    def _is_last_only(self, plan: StepPlan) -> bool:
        """Whether the model should return only the hidden states that tokens are sampled from, each once."""
        return (
            self._is_last_stage
            and self._model.supports_last_tokens
            and plan.num_tokens > len(plan.rows)
            and not plan.num_drafts
            and (self._batch.adapters is None or self._batch.adapters.tokens is None)
            and not (plan.proposals and self._proposer is not None and self._proposer.needs_hidden)
            and not plan.forks
            and not (self._batch.kinds[plan.rows] & (RowKind.PROMPT_LOGPROBS | RowKind.MEAN)).any()
        )


@dataclass
class RecordedPass:
    """A forward pass over fixed buffers: fill them, call `replay`, read `hidden`."""

    inputs: StepInputs
    hidden: torch.Tensor
    replay: Callable[[], None]
    adapters: torch.Tensor | None = None
    """[tokens]: the adapter slot of each token; None: it computes without adapters."""

    def run(self, step: StepInputs, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """The step's hidden states; the next run overwrites them."""
        if self.adapters is not None and adapters is not None:
            self.adapters.copy_(adapters)
        self.inputs.tokens.copy_(step.tokens)
        self.inputs.positions.copy_(step.positions)
        for own, given in zip(self.inputs.attention, step.attention, strict=True):
            own.slots.copy_(given.slots)
            own.context_lens.copy_(given.context_lens)
            own.query_starts.copy_(given.query_starts)
            own.block_tables[:, : given.block_tables.shape[1]].copy_(given.block_tables)
        self.replay()
        return self.hidden


class TapeDecodePath:
    """Pure decodes on a device that records forward passes (`Ops.capture`): the CPU's tape.

    A small decode is bound by the host: hundreds of short kernels, each called from Python. Its shape depends only on
    the number of rows, so the forward pass is recorded once over fixed buffers, and later steps fill the buffers and
    replay it. Inputs and sampling run as in an eager step.

    Decodes that verify drafts are recorded by rows and tokens: which row has how many tokens is in a buffer.
    """

    def __init__(self, model: CausalLM, batch: DeviceBatch, ops: Ops, proposer: DeviceProposer | None = None) -> None:
        self._model = model
        self._batch = batch
        self._ops = ops
        self._proposer = proposer
        self._enabled = True
        self._records_adapters = True
        self._passes: dict[TapeShape, RecordedPass] = {}

    def fit(self, plan: StepPlan) -> TapeShape | None:
        rows = len(plan.rows)
        if not self._enabled or plan.num_tokens > TAPE_ROWS or plan.num_decodes < rows:
            return None
        adapters, version = self._batch.adapters, -1
        if adapters is not None and adapters.is_active:
            if not self._records_adapters or adapters.is_special(plan):
                return None
            version = adapters.slots.version
        width = int(plan.counts.max()) if plan.num_drafts else 1
        shape = TapeShape(rows, plan.num_tokens, width, torch.get_num_threads(), version)
        return shape if shape in self._passes or len(self._passes) < TAPES else None

    def pad(self, plan: StepPlan, shape: TapeShape) -> tuple[StepPlan, int]:
        return plan, 0

    def run(self, plan: StepPlan, shape: TapeShape) -> PathOutput:
        inputs = self._batch.inputs(plan)
        self._batch.fork(plan.forks)
        recorded, adapters = self._passes.get(shape), self._batch.adapters
        slots = None if adapters is None or adapters.tokens is None else adapters.tokens.slots
        hidden = self._record(shape, inputs) if recorded is None else recorded.run(inputs, slots)
        if recorded is not None:
            inputs.features = recorded.inputs.features
        return PathOutput(hidden, inputs=inputs)

    def _record(self, shape: TapeShape, step: StepInputs) -> torch.Tensor:
        # Hidden states of the previous pipeline stage always arrive in the same buffer.
        groups = as_siblings([self._own_inputs(group, given) for group, given in enumerate(step.attention)])
        inputs = StepInputs(step.tokens.clone(), step.positions.clone(), groups, step.hidden)
        request_features(inputs, self._proposer)
        slots = None if self._batch.adapters is None else self._batch.adapters.own_buffer()
        hidden, replay = self._ops.capture(functools.partial(forward, self._model, self._batch, inputs))
        if replay is not None:
            self._passes[shape] = RecordedPass(inputs, hidden, replay, slots)
        elif slots is None:
            self._enabled = False  # this model, or this device, cannot be recorded
        else:
            self._records_adapters = False  # these adapters have biases or DoRA, which are no native calls
        step.features = inputs.features
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


def see_spans(plan: StepPlan, inputs: StepInputs, batch: DeviceBatch) -> None:
    """Tell attention which of the step's tokens see each other both ways."""
    ahead = np.zeros(plan.num_tokens, np.int32)
    for span in plan.visible:
        ahead[span.start : span.start + span.length] = np.arange(span.length - 1, -1, -1)
    (uploaded,) = batch.upload(ahead)
    for group in inputs.attention:
        group.ahead = uploaded.to(torch.int32)


def forward(model: CausalLM, batch: DeviceBatch, step: StepInputs) -> torch.Tensor:
    """Hidden states of a step's tokens."""
    inputs = step.attention[0]
    if batch.adapters is not None:
        batch.adapters.enter()
    hidden = model.forward(step.tokens, step.positions, batch.kv.layers, inputs, step.hidden)
    if batch.adapters is not None:
        batch.adapters.leave()
    if inputs.features is not None:
        step.features = inputs.features.joined
    return hidden


def request_features(inputs: StepInputs, proposer: DeviceProposer | None) -> None:
    """Ask the model for what the proposer reads of its forward pass."""
    if proposer is not None and proposer.feature_layers:
        inputs.attention[0].features = FeatureRequest(proposer.feature_layers)


def propose(proposer: DeviceProposer, step: ProposalStep) -> None:
    """Let the proposer make drafts. Once it has raised there are none, and requests go on without."""
    batch = step.batch
    if batch.proposer_error is None:
        try:
            proposer.propose(step)
        except Exception as error:
            logger.exception("%s failed, and makes no more drafts: requests go on without", type(proposer).__name__)
            batch.proposer_error = error
    if batch.proposer_error is not None:
        batch.num_drafts.index_fill_(0, step.rows, 0)
    elif batch.checks_drafts:
        batch.drafts.clamp_(0, batch.vocab_size - 1)
        batch.num_drafts.clamp_(0, MAX_WIDTH - 1)
