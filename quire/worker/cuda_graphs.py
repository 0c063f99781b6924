"""Steps as CUDA graphs: one launch for what would be hundreds.

A pure decode step runs the same kernels for any rows: row numbers are in fixed buffers. Each *capture size* (a
batch size that has a graph) has one graph for the whole step (inputs, forward pass, plain sampling, rows updated) and,
captured when first needed, one for the forward pass alone, for steps whose sampling needs more. A step runs at the
next capture size up; missing rows are the batch's padding row, which is never active. Steps with prefix groups run
other attention kernels and have graphs of their own, captured when first needed. So do mixed steps, which compute
prompts and decodes, padded to one of a few shapes (`mixed_steps.py`).

All graphs share one memory pool: no two of them run at once, and each one's results are read before the next is
launched on the same stream.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.kernels.triton.prefill_attention import LONG_CONTEXT
from quire.messages.plan import StepPlan
from quire.models.base import CausalLM
from quire.worker.cuda_batch import CudaBatch
from quire.worker.extras import RowKind
from quire.worker.mixed_steps import TOKENS, MixedShape, pad_plan, shape_of
from quire.worker.paths import DecodeShape, PathOutput, StepPath, forward, require_single_query

WARM_DECODES = 16
WARM_TOKENS = (64, 512)
"""Prompt tokens of the mixed steps with decodes that are captured at start: together they load every kernel."""
_spare_streams: dict[int, list[torch.cuda.Stream]] = {}
"""By device, streams that earlier engines captured on: cuBLAS keeps 32 MiB for every stream it was ever used on."""


def capture_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture: fine where one row more or less matters, coarse above."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, *range(24, 64, 8), *range(64, 256, 16), *range(256, 512, 32)]
    sizes += range(512, 1025, 64)
    return [size for size in sizes if size < max_rows] + [max_rows]


def next_sizes(sizes: Sequence[int]) -> list[int]:
    """For each number of rows, the capture size it runs at."""
    table: list[int] = []
    for size in sizes:
        table += [size] * (size + 1 - len(table))
    return table


class CapturedGraph:
    """A graph, and the tensor its captured function returned."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor | None) -> None:
        self._graph = graph
        self._output = output

    def replay(self) -> torch.Tensor | None:
        """Run it; the output is overwritten by the next graph of the pool."""
        self._graph.replay()
        return self._output


class GraphPool:
    """Captures graphs on one stream into one memory pool."""

    def __init__(self, batch: CudaBatch) -> None:
        self._stream = _take_stream(self)
        self._pool = torch.cuda.graph_pool_handle()
        # A pool is freed with its last graph: this one is never dropped and keeps the pool alive.
        self._anchor = self.capture(lambda: batch.buffers.slot.clone())

    def capture(self, run: Callable[[], torch.Tensor | None], warm_up: bool = False) -> CapturedGraph:
        """Capture what `run` launches. `warm_up`: run it once before, which loads its kernels."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if warm_up:
                run()
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                output = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return CapturedGraph(graph, output)


class _CapturedPath(ABC):
    """Graphs of one kind of step, by shape: of whole steps, and of forward passes alone."""

    PLAIN_KINDS: RowKind
    """Rows of these kinds alone are sampled inside the graph."""

    def __init__(self, model: CausalLM, batch: CudaBatch, pool: GraphPool, is_last_stage: bool) -> None:
        """`is_last_stage`: of the pipeline; other stages sample nothing and have graphs of forward passes only."""
        self._model = model
        self._batch = batch
        self._pool = pool
        self._is_last_stage = is_last_stage
        self._steps: dict[Any, CapturedGraph] = {}
        self._forwards: dict[Any, CapturedGraph] = {}
        self._stop_ids = batch.stop_ids

    @abstractmethod
    def _step(self, shape: Any) -> None:
        """Launch a whole step, to be captured."""

    @abstractmethod
    def _forward(self, shape: Any) -> torch.Tensor:
        """Launch a forward pass, to be captured; returns its hidden states."""

    def _is_plain(self, plan: StepPlan) -> bool:
        """Whether the graph of the whole step samples what the plan's rows need."""
        return self._is_last_stage and not (self._batch.kinds[plan.rows] & ~self.PLAIN_KINDS).any()

    def _run_step(self, shape: Any) -> None:
        if self._batch.stop_ids is not self._stop_ids:  # widened: graphs of whole steps have the old column's address
            self._steps.clear()
            self._stop_ids = self._batch.stop_ids
        if shape not in self._steps:
            self._steps[shape] = self._pool.capture(lambda: self._step(shape))
        self._steps[shape].replay()

    def _run_forward(self, shape: Any) -> torch.Tensor:
        if shape not in self._forwards:
            self._forwards[shape] = self._pool.capture(lambda: self._forward(shape))
        hidden = self._forwards[shape].replay()
        assert hidden is not None
        return hidden

    def _capture(self, shape: Any) -> None:
        """Capture the graph that plain steps of this shape run."""
        if self._is_last_stage:
            self._steps[shape] = self._pool.capture(lambda: self._step(shape), warm_up=True)
        else:
            self._forwards[shape] = self._pool.capture(lambda: self._forward(shape), warm_up=True)

    def _will_be_grouped(self, plan: StepPlan) -> bool:
        """Whether there are prefix groups once the plan is applied."""
        return self._batch.groups.exist if plan.groups is None else bool(plan.groups)


class CapturedDecodePath(_CapturedPath):
    """Pure decodes, padded to a capture size. A plain one is one graph launch after the plan is applied."""

    # Prompt logprobs are reported with the prompt, so they do not matter here.
    PLAIN_KINDS = RowKind.RANDOM | RowKind.PROMPT_LOGPROBS

    def __init__(
        self, model: CausalLM, batch: CudaBatch, pool: GraphPool, is_last_stage: bool, sizes: Sequence[int],
        width: int = 1,
    ) -> None:  # fmt: skip
        """`sizes`: the capture sizes, ascending. `width`: query tokens per row."""
        require_single_query(width)
        super().__init__(model, batch, pool, is_last_stage)
        self._sizes = sizes
        self._width = width
        self._size_of = next_sizes(sizes)

    def fit(self, plan: StepPlan) -> DecodeShape | None:
        rows = len(plan.rows)
        if rows != plan.num_decodes or not 0 < rows < len(self._size_of):
            return None
        return DecodeShape(self._size_of[rows], self._width, self._will_be_grouped(plan))

    def pad(self, plan: StepPlan, shape: DecodeShape) -> tuple[StepPlan, int]:
        return plan, shape.rows

    def run(self, plan: StepPlan, shape: DecodeShape) -> PathOutput:
        if not self._is_plain(plan):
            return PathOutput(self._run_forward(shape))
        self._run_step(shape)
        return PathOutput(None)

    @torch.inference_mode()
    def capture_all(self, reads_groups: bool) -> None:
        """Capture every size, the largest first, so that the smaller ones fit into its memory.

        Kernels are loaded by a run over padding rows, which write only to the null block.
        """
        shapes = [DecodeShape(size, self._width, grouped=False) for size in reversed(self._sizes)]
        if reads_groups:  # between them these load every kernel
            largest = self._sizes[-1]
            sizes = {self._size_of[min(rows, largest)] for rows in (1, 256, largest)}
            shapes += [DecodeShape(size, self._width, grouped=True) for size in sizes]
        for shape in shapes:
            self._batch.buffers.rows.fill_(self._batch.pad_row)
            self._capture(shape)

    def _step(self, shape: DecodeShape) -> None:
        logits = self._model.logits(self._forward(shape))
        self._batch.draw(logits, self._batch.buffers.rows[: shape.rows], 0, filtered=False)

    def _forward(self, shape: DecodeShape) -> torch.Tensor:
        rows, width, grouped = shape
        inputs = self._batch.empty_inputs(rows, rows * width, rows, width, 0, grouped)
        self._batch.expand(inputs)
        return forward(self._model, self._batch, inputs)


class CapturedMixedPath(_CapturedPath):
    """Steps with a few short prompts and any decodes, padded to a `MixedShape`."""

    PLAIN_KINDS = RowKind.RANDOM

    def fit(self, plan: StepPlan) -> MixedShape | None:
        if plan.num_decodes == len(plan.rows) or not self._only_samples(plan):
            return None
        buffers = self._batch.buffers
        return shape_of(plan, LONG_CONTEXT, self._will_be_grouped(plan), len(buffers.picks), len(buffers.tokens))

    def pad(self, plan: StepPlan, shape: MixedShape) -> tuple[StepPlan, int]:
        return pad_plan(plan, shape, self._batch.pad_row), 0

    def run(self, plan: StepPlan, shape: MixedShape) -> PathOutput:
        if not self._is_last_stage:
            return PathOutput(self._run_forward(shape))
        if not self._is_plain(plan):
            return PathOutput(self._run_forward(shape)[: len(plan.samples)], last_only=True)
        self._run_step(shape)
        return PathOutput(None)

    @torch.inference_mode()
    def capture_some(self) -> None:
        """Capture a few shapes, and all of a prompt alone, so that the first request does not wait for it. Others are
        captured when first needed, with kernels that are loaded here."""
        some = [(WARM_DECODES, tokens, is_long) for tokens, is_long in itertools.product(WARM_TOKENS, (False, True))]
        for decodes, tokens, is_long in [*some, *((0, tokens, False) for tokens in TOKENS)]:
            shape = MixedShape(decodes, tokens, is_long, grouped=False)
            if self._lay_out_padding(shape):
                self._capture(shape)

    def _lay_out_padding(self, shape: MixedShape) -> bool:
        """Fill the step's buffers with padding rows of this shape; False if the batch is too small for it."""
        buffers = self._batch.buffers
        if shape.draws > len(buffers.picks) or shape.tokens > len(buffers.tokens):
            return False
        buffers.rows.fill_(self._batch.pad_row)
        buffers.draw_rows.fill_(self._batch.pad_row)
        buffers.picks.zero_()
        buffers.tokens.zero_()
        starts = torch.arange(shape.rows + 1, dtype=torch.int32, device=buffers.rows.device).clamp(max=shape.decodes)
        starts[-1] = shape.decodes + shape.tokens
        buffers.query_starts[: shape.rows + 1] = starts
        return True

    def _only_samples(self, plan: StepPlan) -> bool:
        """Whether rows with prompt tokens yield only sampled tokens in this step. New rows are not in `kinds` yet."""
        added = {new.row: RowKind.of(new) for new in plan.add}
        kinds = [added.get(row, self._batch.kinds[row]) for row in plan.rows[plan.num_decodes :].tolist()]
        return not any(kind & (RowKind.PROMPT_LOGPROBS | RowKind.POOLED) for kind in kinds)

    def _step(self, shape: MixedShape) -> None:
        logits = self._model.logits(self._forward(shape))
        self._batch.draw(logits, self._batch.buffers.draw_rows[: shape.draws], 0, filtered=False)

    def _forward(self, shape: MixedShape) -> torch.Tensor:
        """One hidden state per draw; of all tokens if another pipeline stage follows."""
        batch, tokens = self._batch, shape.num_tokens
        context = LONG_CONTEXT + 1 if shape.is_long else 1
        inputs = batch.empty_inputs(shape.rows, tokens, shape.decodes, shape.tokens, context, shape.grouped)
        batch.expand(inputs)
        if not self._is_last_stage:
            return forward(self._model, batch, inputs)
        if not self._model.supports_last_tokens:
            return forward(self._model, batch, inputs)[batch.buffers.picks[: shape.draws]]
        inputs.attention[0].last = batch.captured_last_tokens(shape.draws, inputs)
        return forward(self._model, batch, inputs)


def captured_paths(
    model: CausalLM, batch: CudaBatch, max_rows: int, is_last_stage: bool, reads_groups: bool
) -> list[StepPath]:
    """The captured paths, most of their graphs captured. `reads_groups`: steps may have prefix groups."""
    pool = GraphPool(batch)
    decode = CapturedDecodePath(model, batch, pool, is_last_stage, capture_sizes(min(max_rows, 1024)))
    mixed = CapturedMixedPath(model, batch, pool, is_last_stage)
    decode.capture_all(reads_groups)
    mixed.capture_some()
    torch.cuda.empty_cache()  # memory of the warm-up runs
    return [decode, mixed]


def _take_stream(owner: GraphPool) -> torch.cuda.Stream:
    """A stream to capture on, returned to the spare ones when its owner is collected."""
    spare = _spare_streams.setdefault(torch.cuda.current_device(), [])
    stream = spare.pop() if spare else torch.cuda.Stream()
    weakref.finalize(owner, spare.append, stream)
    return stream
