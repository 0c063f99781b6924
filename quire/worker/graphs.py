"""Forward passes of pure decode steps, learned once for each number of rows and replayed.

A small decode is bound by the host: hundreds of short kernels, each called from Python. Its shape depends on nothing
but the number of rows, so the device can learn it over buffers that stay, and later steps only fill the buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.kernels.base import Ops
from quire.layers.attention.base import AttentionInputs
from quire.messages.plan import StepPlan
from quire.models.base import CausalLM
from quire.worker.batch import StepInputs
from quire.worker.mixed_steps import MixedShape

MOST_ROWS = 32
"""With more rows a step is long enough for Python to keep up."""


@dataclass
class Graph:
    """A learned pass: fill `inputs`, call `replay`, read `hidden`."""

    tokens: torch.Tensor
    positions: torch.Tensor
    inputs: AttentionInputs
    hidden: torch.Tensor
    replay: Callable[[], None]

    def run(self, step: StepInputs) -> torch.Tensor:
        """The step's hidden states; the next run of this graph writes over them."""
        given, own = step.attention, self.inputs
        self.tokens.copy_(step.tokens)
        self.positions.copy_(step.positions)
        own.slots.copy_(given.slots)
        own.context_lens.copy_(given.context_lens)
        own.block_tables[:, : given.block_tables.shape[1]].copy_(given.block_tables)
        self.replay()
        return self.hidden


class Graphs(Protocol):
    """How a device runs the model."""

    def padded_rows(self, plan: StepPlan) -> int:
        """Rows of the captured step that fits the plan; 0 where the plan runs as it is, by `forward`."""
        ...

    def run_step(self, rows: int) -> None:
        """The captured step of so many rows: forward pass, plain sampling, and the rows brought up to date."""
        ...

    def run_forward(self, rows: int) -> torch.Tensor:
        """Its forward pass alone: hidden states, valid until the next step."""
        ...

    def mixed_shape(self, plan: StepPlan) -> MixedShape | None:
        """The captured shape that a step with prompts can be padded to; None where it runs as it is."""
        ...

    def padded(self, plan: StepPlan, shape: MixedShape) -> StepPlan:
        """The plan brought to that shape."""
        ...

    def run_mixed_step(self, shape: MixedShape) -> None:
        """The captured step of that shape, as `run_step`."""
        ...

    def run_mixed_forward(self, shape: MixedShape) -> torch.Tensor:
        """Its forward pass alone: one hidden state a draw (on the last pipeline stage; else one a token, padding too),
        valid until the next step."""
        ...

    def forward(self, step: StepInputs) -> torch.Tensor:
        """Hidden states of the step's tokens."""
        ...


class DecodeGraphs:
    """Runs the model, through a graph where there is one."""

    def __init__(self, model: CausalLM, kv: Sequence[torch.Tensor], ops: Ops, table_width: int, enabled: bool) -> None:
        self._model = model
        self._kv = kv
        self._ops = ops
        self._table_width = table_width
        self._enabled = enabled
        self._graphs: dict[tuple[int, int], Graph] = {}

    def padded_rows(self, plan: StepPlan) -> int:
        return 0

    def mixed_shape(self, plan: StepPlan) -> MixedShape | None:
        return None

    def padded(self, plan: StepPlan, shape: MixedShape) -> StepPlan:
        raise NotImplementedError("steps with prompts run as they are here")

    def run_mixed_step(self, shape: MixedShape) -> None:
        raise NotImplementedError("steps with prompts run as they are here")

    def run_mixed_forward(self, shape: MixedShape) -> torch.Tensor:
        raise NotImplementedError("steps with prompts run as they are here")

    def run_step(self, rows: int) -> None:
        raise NotImplementedError("steps are not captured whole on this device")

    def run_forward(self, rows: int) -> torch.Tensor:
        raise NotImplementedError("steps are not captured whole on this device")

    def forward(self, step: StepInputs) -> torch.Tensor:
        """Hidden states of the step's tokens."""
        inputs = step.attention
        rows = inputs.num_rows
        if not self._enabled or rows > MOST_ROWS or inputs.num_decodes < rows:
            return self._model.forward(step.tokens, step.positions, self._kv, inputs, step.hidden)
        # A graph has the number of threads in it: one per number of rows and threads.
        key = (rows, torch.get_num_threads())
        graph = self._graphs.get(key)
        return self._learn(key, step) if graph is None else graph.run(step)

    def _learn(self, key: tuple[int, int], step: StepInputs) -> torch.Tensor:
        given = step.attention
        tokens, positions = step.tokens.clone(), step.positions.clone()
        tables = given.block_tables.new_zeros(given.num_rows, self._table_width)
        tables[:, : given.block_tables.shape[1]] = given.block_tables
        inputs = AttentionInputs(
            slots=given.slots.clone(),
            query_starts=given.query_starts.clone(),
            context_lens=given.context_lens.clone(),
            block_tables=tables,
            num_rows=given.num_rows,
            num_tokens=given.num_tokens,
            num_decodes=given.num_decodes,
            max_query_len=1,
            max_context_len=given.max_context_len,
        )
        # What comes from the stage before stays where it is.
        run = functools.partial(self._model.forward, tokens, positions, self._kv, inputs, step.hidden)
        hidden, replay = self._ops.capture(run)
        if replay is None:
            self._enabled = False  # this model, or this device, cannot be learned
        else:
            self._graphs[key] = Graph(tokens, positions, inputs, hidden, replay)
        return hidden
