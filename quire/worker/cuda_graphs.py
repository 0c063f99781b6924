"""Decode steps as CUDA graphs: one launch for what would be hundreds.

A pure decode step is the same kernels whatever its rows are: their numbers lie in buffers that stay. Each *rung* of a
ladder of batch sizes has one graph for the whole step (inputs, forward pass, plain sampling, rows brought up to date)
and, captured when first needed, one for the forward pass alone, for steps whose sampling is out of the ordinary. A
step takes the next rung up; the rows it lacks are the batch's padding row, which is never active. Steps with rows that
begin alike take another way through attention, and have graphs of their own, captured when first needed. So have
steps that compute prompts beside decodes, padded to one of a few shapes (`mixed_steps.py`).

All graphs share one memory pool: no two of them run at once, and each one's results are read before the next is
launched on the same stream.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch

from quire.kernels.triton.prefill_attention import LONG_CONTEXT
from quire.messages.plan import StepPlan
from quire.models.base import CausalLM
from quire.worker.batch import StepInputs
from quire.worker.cuda_batch import CudaBatch
from quire.worker.mixed_steps import MixedShape, padded, shape_of


def ladder(max_rows: int) -> list[int]:
    """Batch sizes to capture: fine where a row more or less is felt, coarse above."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, *range(24, 64, 8), *range(64, 256, 16), *range(256, 512, 32)]
    sizes += range(512, 1025, 64)
    return [size for size in sizes if size < max_rows] + [max_rows]


WARM_DECODES = 16
WARM_TOKENS = (64, 512)
"""Steps with prompts that are captured at the start: between them they load every kernel."""
_spare_streams: dict[int, list[torch.cuda.Stream]] = {}
"""By device, those that engines before have captured on: cuBLAS keeps 32 MiB for every stream it was ever used on."""
Shape = tuple[int, bool]
"""What a graph is for: so many rows, and whether some of them are groups that begin alike."""


class CudaGraphs:
    """Runs the model on a GPU."""

    def __init__(
        self, model: CausalLM, batch: CudaBatch, max_rows: int, enabled: bool, reads_groups: bool = False,
        draws: bool = True,
    ) -> None:  # fmt: skip
        """`reads_groups`: whether there will be steps with groups; their kernels are loaded by `capture` then.
        `draws`: whether this is the last pipeline stage; others have no steps but forward passes."""
        self._model = model
        self._batch = batch
        self._kv = batch.kv.layers
        self._rungs = ladder(min(max_rows, 1024)) if enabled else []
        self._rung_of = _next_rung(self._rungs)
        self._stream = _take_stream(self) if enabled else None
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self._reads_groups = reads_groups
        self._draws = draws
        self._steps: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._forwards: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._mixed_steps: dict[MixedShape, torch.cuda.CUDAGraph] = {}
        self._mixed_forwards: dict[MixedShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._stops = batch.stop_ids
        # A pool dies with its last graph: one that is never dropped keeps it, whichever others are.
        self._anchor = self._captured(lambda: batch.buffers.slot.clone()) if enabled else None

    # What is captured when

    def capture(self) -> None:
        """Capture every rung's step, the largest first, so that the smaller ones fit into its memory."""
        for rows in self._rungs[::-1]:
            self._capture_step((rows, False))
        if self._reads_groups and self._rungs:
            for rows in {self._rung_of[min(rows, self._rungs[-1])] for rows in (1, 256, self._rungs[-1])}:
                self._capture_step((rows, True))  # between them they load every kernel
        for tokens, is_long in itertools.product(WARM_TOKENS, (False, True)):
            self._capture_mixed(MixedShape(WARM_DECODES, tokens, is_long, False))
        if self._rungs:
            torch.cuda.empty_cache()  # what the runs before the captures took

    @torch.inference_mode()
    def _capture_mixed(self, shape: MixedShape) -> None:
        """As `_capture_step`: others of the kind are captured when first needed, with kernels that are loaded here."""
        buffers = self._batch.buffers
        if not self._rungs or shape.draws > len(buffers.picks) or shape.tokens > len(buffers.tokens):
            return
        buffers.rows.fill_(self._batch.pad_row)
        buffers.draw_rows.fill_(self._batch.pad_row)
        buffers.picks.zero_()
        buffers.tokens.zero_()
        starts = torch.arange(shape.rows + 1, dtype=torch.int32, device=buffers.rows.device).clamp(max=shape.decodes)
        starts[-1] = shape.decodes + shape.tokens
        buffers.query_starts[: shape.rows + 1] = starts
        if self._draws:
            self._mixed_steps[shape] = self._captured(lambda: self._mixed_step(shape), warm_up=True)
        else:
            self._mixed_forwards[shape] = self._captured_pass(lambda: self._mixed_forward(shape), warm_up=True)

    @torch.inference_mode()
    def _capture_step(self, shape: Shape) -> None:
        """Kernels are loaded by a run over padding rows, which write to the null block and nowhere else."""
        self._batch.buffers.rows.fill_(self._batch.pad_row)
        if self._draws:
            self._steps[shape] = self._captured(lambda: self._step(shape), warm_up=True)
        else:
            self._forwards[shape] = self._captured_pass(lambda: self._forward(shape), warm_up=True)

    def _captured_pass(
        self, run: Callable[[], torch.Tensor], warm_up: bool = False
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph, and where its hidden states are."""
        hidden: list[torch.Tensor] = []
        graph = self._captured(lambda: hidden.append(run()), warm_up)
        return graph, hidden[-1]

    def _captured(self, run: Callable[[], object], warm_up: bool = False) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if warm_up:
                run()
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    # What is in a graph

    def _step(self, shape: Shape) -> None:
        hidden = self._forward(shape)
        self._batch.draw(self._model.logits(hidden), self._batch.buffers.rows[: shape[0]], 0, filtered=False)

    def _forward(self, shape: Shape) -> torch.Tensor:
        rows, grouped = shape
        inputs = self._batch.empty_inputs(rows, rows, rows, 1, 0, grouped)
        self._batch.expand(inputs)
        return self.forward(inputs)

    def _mixed_step(self, shape: MixedShape) -> None:
        hidden = self._mixed_forward(shape)
        self._batch.draw(self._model.logits(hidden), self._batch.buffers.draw_rows[: shape.draws], 0, filtered=False)

    def _mixed_forward(self, shape: MixedShape) -> torch.Tensor:
        """Hidden states that something is drawn from, one a draw; of all tokens where another stage follows."""
        batch, tokens = self._batch, shape.num_tokens
        context = LONG_CONTEXT + 1 if shape.is_long else 1
        inputs = batch.empty_inputs(shape.rows, tokens, shape.decodes, shape.tokens, context, shape.grouped)
        batch.expand(inputs)
        if not self._draws:
            return self.forward(inputs)
        if not getattr(self._model, "narrows", False):
            return self.forward(inputs)[batch.buffers.picks[: shape.draws]]
        inputs.attention.last = batch.last_of(shape.draws, inputs)
        return self.forward(inputs)

    # How a step runs

    def padded_rows(self, plan: StepPlan) -> int:
        rows = len(plan.rows)
        return self._rung_of[rows] if rows == plan.num_decodes and 0 < rows < len(self._rung_of) else 0

    def run_step(self, rows: int) -> None:
        if self._batch.stop_ids is not self._stops:  # the column was widened
            self._forget_steps()
        shape = (rows, self._batch.groups.exist)
        if shape not in self._steps:
            self._steps[shape] = self._captured(lambda: self._step(shape))
        self._steps[shape].replay()

    def run_forward(self, rows: int) -> torch.Tensor:
        shape = (rows, self._batch.groups.exist)
        if shape not in self._forwards:
            self._forwards[shape] = self._captured_pass(lambda: self._forward(shape))
        graph, states = self._forwards[shape]
        graph.replay()
        return states

    def mixed_shape(self, plan: StepPlan) -> MixedShape | None:
        if not self._rungs or plan.num_decodes == len(plan.rows):
            return None
        grouped = self._batch.groups.exist if plan.groups is None else bool(plan.groups)
        buffers = self._batch.buffers
        return shape_of(plan, LONG_CONTEXT, grouped, len(buffers.picks), len(buffers.tokens))

    def padded(self, plan: StepPlan, shape: MixedShape) -> StepPlan:
        return padded(plan, shape, self._batch.pad_row)

    def run_mixed_step(self, shape: MixedShape) -> None:
        if self._batch.stop_ids is not self._stops:
            self._forget_steps()
        if shape not in self._mixed_steps:
            self._mixed_steps[shape] = self._captured(lambda: self._mixed_step(shape))
        self._mixed_steps[shape].replay()

    def run_mixed_forward(self, shape: MixedShape) -> torch.Tensor:
        if shape not in self._mixed_forwards:
            self._mixed_forwards[shape] = self._captured_pass(lambda: self._mixed_forward(shape))
        graph, states = self._mixed_forwards[shape]
        graph.replay()
        return states

    def _forget_steps(self) -> None:
        """A column has moved that graphs of whole steps have the address of."""
        self._steps.clear()
        self._mixed_steps.clear()
        self._stops = self._batch.stop_ids

    def forward(self, step: StepInputs) -> torch.Tensor:
        return self._model.forward(step.tokens, step.positions, self._kv, step.attention, step.hidden)


def _take_stream(owner: CudaGraphs) -> torch.cuda.Stream:
    """A stream to capture on, which others may have when its owner is gone."""
    spare = _spare_streams.setdefault(torch.cuda.current_device(), [])
    stream = spare.pop() if spare else torch.cuda.Stream()
    weakref.finalize(owner, spare.append, stream)
    return stream


def _next_rung(rungs: Sequence[int]) -> list[int]:
    """For each number of rows, the rung it runs on."""
    table: list[int] = []
    for rung in rungs:
        table += [rung] * (rung + 1 - len(table))
    return table
