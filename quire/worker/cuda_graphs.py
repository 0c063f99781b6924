"""Steps as CUDA graphs: one launch for what would be hundreds.

A pure decode step runs the same kernels for any rows: row numbers are in fixed buffers. Each *capture size* (a
batch size that has a graph) has one graph for the whole step (inputs, forward pass, plain sampling, rows updated) and,
captured when first needed, one for the forward pass alone, for steps whose sampling needs more. A step runs at the
next capture size up; missing rows are the batch's padding row, which is never active. Steps with prefix groups run
other attention kernels and have graphs of their own, captured when first needed. So do mixed steps, which compute
prompts and decodes, and decodes that verify drafts, padded to one of a few shapes (`mixed_steps.py`,
`verify_steps.py`). A proposer on the device runs after the draws, in the same graph.

All graphs share one memory pool: no two of them run at once, and each one's results are read before the next is
launched on the same stream.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quire.kernels.triton.prefill_attention import LONG_CONTEXT
from quire.messages.plan import StepPlan
from quire.models.base import CausalLM
from quire.speculative.device import DeviceProposer, ProposalStep
from quire.worker.batch import StepInputs
from quire.worker.cuda_batch import CudaBatch
from quire.worker.extras import RowKind
from quire.worker.logprobs import LOGIT_ROWS
from quire.worker.mixed_steps import TOKENS, MixedShape, pad_plan, shape_of
from quire.worker.paths import DecodeShape, PathOutput, StepPath, forward, propose, request_features
from quire.worker.verify_steps import VerifyShape, pad_verifying, smallest_above, verify_shape

logger = logging.getLogger(__name__)

VERIFYING_GRAPHS = 256
"""Most shapes of steps that verify drafts that have graphs; the oldest makes room for a new one."""
CAPTURE_AFTER = 8
"""Steps of a shape that run in a larger captured one, if there is any, before the shape gets a graph: a capture takes
as long as several steps, and many shapes come up only once."""
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


class CapturedForward(NamedTuple):
    """What a captured forward pass leaves: memory that the next graph of the pool overwrites."""

    hidden: torch.Tensor
    inputs: StepInputs


class CapturedGraph:
    """A graph, and what its captured function returned."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Any) -> None:
        self._graph = graph
        self._output = output

    def replay(self) -> Any:
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

    def capture(self, run: Callable[[], Any], warm_up: bool = False) -> CapturedGraph:
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

    def __init__(
        self, model: CausalLM, batch: CudaBatch, pool: GraphPool, is_last_stage: bool,
        proposer: DeviceProposer | None = None,
    ) -> None:  # fmt: skip
        """`is_last_stage`: of the pipeline; other stages sample nothing and have graphs of forward passes only."""
        self._model = model
        self._batch = batch
        self._pool = pool
        self._is_last_stage = is_last_stage
        self._proposer = proposer
        self._steps: dict[Any, CapturedGraph] = {}
        self._forwards: dict[Any, CapturedGraph] = {}
        self._stop_ids = batch.stop_ids
        self._adapter_version = 0

    @abstractmethod
    def _step(self, shape: Any) -> None:
        """Launch a whole step, to be captured."""

    @abstractmethod
    def _forward(self, shape: Any) -> CapturedForward:
        """Launch a forward pass, to be captured."""

    @abstractmethod
    def _lay_out_padding(self, shape: Any) -> bool:
        """Fill the step's buffers with padding rows of this shape; False if the batch is too small for it."""

    def _is_plain(self, plan: StepPlan) -> bool:
        """Whether the graph of the whole step samples what the plan's rows need."""
        if plan.num_drafts and self._batch.draft_probs is not None:
            return False
        return self._is_last_stage and not (self._batch.kinds[plan.rows] & ~self.PLAIN_KINDS).any()

    def _is_adapted(self, plan: StepPlan) -> bool | None:
        """Whether rows of the step have adapters; None: such that it cannot be captured. Stages agree on it."""
        adapters = self._batch.adapters
        if adapters is None or not adapters.is_active:
            return False
        return None if adapters.is_special(plan) else True

    def _drop_outdated(self) -> None:
        """Drop graphs that lack what an adapter has brought since they were captured."""
        adapters = self._batch.adapters
        if adapters is not None and adapters.slots.version != self._adapter_version:
            self._adapter_version = adapters.slots.version
            for graphs in (self._steps, self._forwards):
                for shape in [shape for shape in graphs if shape.adapted]:
                    del graphs[shape]

    def _proposals(self, plan: StepPlan) -> int:
        """Drafts that the plan's step makes for each row that draws."""
        return plan.proposals if self._proposer is not None and self._is_last_stage else 0

    def _run_step(self, shape: Any) -> None:
        if self._batch.stop_ids is not self._stop_ids:  # widened: graphs of whole steps have the old column's address
            self._steps.clear()
            self._stop_ids = self._batch.stop_ids
        if shape.adapted:
            self._drop_outdated()
        if shape not in self._steps:
            self._load_kernels(lambda: self._step(shape), shape)
            self._steps[shape] = self._pool.capture(lambda: self._step(shape))
        self._steps[shape].replay()

    def _run_forward(self, shape: Any) -> CapturedForward:
        if shape.adapted:
            self._drop_outdated()
        if shape not in self._forwards:
            self._load_kernels(lambda: self._forward(shape), shape)
            self._forwards[shape] = self._pool.capture(lambda: self._forward(shape))
        found: CapturedForward = self._forwards[shape].replay()
        return found

    def _load_kernels(self, run: Callable[[], Any], shape: Any) -> None:
        """Run a step of padding rows before a step with real ones is captured, if it may launch kernels that no other
        graph has: a kernel cannot be loaded during a capture."""
        if not self._needs_loading(shape):
            return
        buffers = self._batch.buffers.tensors
        kept = [tensor.clone() for tensor in buffers]
        self._lay_out_padding(shape)
        run()
        for tensor, values in zip(buffers, kept, strict=True):
            tensor.copy_(values)

    def _needs_loading(self, shape: Any) -> bool:
        """Whether the shape has a proposer's or adapters' kernels in its graph."""
        return bool(shape.proposals) or shape.adapted

    def _propose(
        self, shape: Any, forward: CapturedForward, rows: torch.Tensor, ends: torch.Tensor, following: torch.Tensor
    ) -> None:
        """Let the proposer make drafts for the rows that have drawn, as `ProposalStep` describes them."""
        if not shape.proposals:
            return
        assert self._proposer is not None
        batch, inputs, rows = self._batch, forward.inputs, rows.long()
        propose(
            self._proposer,
            ProposalStep(
                tokens=inputs.tokens,
                positions=inputs.positions,
                following=following,
                attention=inputs.attention,
                hidden=forward.hidden,
                features=inputs.features,
                rows=rows,
                ends=ends.long(),
                count=shape.proposals,
                batch=batch,
                kv=batch.kv.proposer_layers,
                lay_out=lambda distance: batch.ahead(rows, distance, 0),
            ),
        )

    def _compute(self, shape: Any, inputs: StepInputs) -> CapturedForward:
        """The forward pass over inputs that are laid out."""
        if shape.proposals:
            request_features(inputs, self._proposer)
        if self._batch.adapters is not None:
            self._batch.adapters.use_buffer(len(inputs.tokens) if shape.adapted else 0)
        return CapturedForward(forward(self._model, self._batch, inputs), inputs)

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
        proposer: DeviceProposer | None = None,
    ) -> None:  # fmt: skip
        """`sizes`: the capture sizes, ascending."""
        super().__init__(model, batch, pool, is_last_stage, proposer)
        self._sizes = sizes
        self._size_of = next_sizes(sizes)

    def fit(self, plan: StepPlan) -> DecodeShape | None:
        rows = len(plan.rows)
        if plan.num_drafts or rows != plan.num_decodes or not 0 < rows < len(self._size_of):
            return None
        if (adapted := self._is_adapted(plan)) is None:
            return None
        return DecodeShape(self._size_of[rows], self._will_be_grouped(plan), self._proposals(plan), adapted)

    def pad(self, plan: StepPlan, shape: DecodeShape) -> tuple[StepPlan, int]:
        return plan, shape.rows

    def run(self, plan: StepPlan, shape: DecodeShape) -> PathOutput:
        if not self._is_plain(plan):
            hidden, inputs = self._run_forward(shape)
            return PathOutput(hidden, inputs=inputs if shape.proposals else None)
        self._run_step(shape)
        return PathOutput(None)

    @torch.inference_mode()
    def capture_all(self, reads_groups: bool) -> None:
        """Capture every size, the largest first, so that the smaller ones fit into its memory.

        Kernels are loaded by a run over padding rows, which write only to the null block.
        """
        shapes = [DecodeShape(size, grouped=False) for size in reversed(self._sizes)]
        if self._batch.adapters is not None:  # the first request with an adapter should not stop others for captures
            shapes += [shape._replace(adapted=True) for shape in shapes]
        if reads_groups:  # between them these load every kernel
            largest = self._sizes[-1]
            sizes = {self._size_of[min(rows, largest)] for rows in (1, 256, largest)}
            shapes += [DecodeShape(size, grouped=True) for size in sizes]
        for shape in shapes:
            self._lay_out_padding(shape)
            self._capture(shape)

    def _lay_out_padding(self, shape: DecodeShape) -> bool:
        self._batch.buffers.rows.fill_(self._batch.pad_row)
        return True

    def _step(self, shape: DecodeShape) -> None:
        batch, passed = self._batch, self._forward(shape)
        rows = batch.buffers.rows[: shape.rows]
        batch.draw(None, self._model.logits(passed.hidden), rows, 0, filtered=False)
        if shape.proposals:
            ends = torch.arange(shape.rows, device=rows.device)
            self._propose(shape, passed, rows, ends, batch.last_token[rows.long()])

    def _forward(self, shape: DecodeShape) -> CapturedForward:
        inputs = self._batch.empty_inputs(shape.rows, shape.rows, shape.rows, 1, 0, shape.grouped)
        self._batch.expand(inputs)
        return self._compute(shape, inputs)


class CapturedVerifyPath(_CapturedPath):
    """Decodes that verify drafts, padded to a `VerifyShape`. Captured when first needed."""

    PLAIN_KINDS = CapturedDecodePath.PLAIN_KINDS

    def __init__(
        self, model: CausalLM, batch: CudaBatch, pool: GraphPool, is_last_stage: bool, sizes: Sequence[int],
        proposer: DeviceProposer | None = None,
    ) -> None:  # fmt: skip
        """`sizes`: the capture sizes, ascending."""
        super().__init__(model, batch, pool, is_last_stage, proposer)
        self._size_of = next_sizes(sizes)
        self._asked: Counter[VerifyShape] = Counter()
        self._chosen: dict[VerifyShape, None] = {}

    def fit(self, plan: StepPlan) -> VerifyShape | None:
        # Pipeline stages must pad alike: what is chosen depends on the plans so far, not on the graphs of this stage.
        if (adapted := self._is_adapted(plan)) is None:
            return None
        shape = verify_shape(plan, self._size_of, self._batch.max_rows, self._proposals(plan), adapted)
        if shape is None or shape in self._chosen:
            return shape
        self._asked[shape] += 1
        if self._asked[shape] <= CAPTURE_AFTER and (larger := smallest_above(plan, shape, self._chosen)) is not None:
            return larger
        del self._asked[shape]
        if len(self._chosen) >= VERIFYING_GRAPHS:
            oldest = next(iter(self._chosen))
            del self._chosen[oldest]
            self._steps.pop(oldest, None)
            self._forwards.pop(oldest, None)
        self._chosen[shape] = None
        return shape

    def pad(self, plan: StepPlan, shape: VerifyShape) -> tuple[StepPlan, int]:
        return pad_verifying(plan, shape, self._batch.pad_row), 0

    def run(self, plan: StepPlan, shape: VerifyShape) -> PathOutput:
        if self._is_plain(plan):
            self._run_step(shape)
            return PathOutput(None)
        hidden, inputs = self._run_forward(shape)
        replay = inputs.attention[0].replay
        if replay is not None:  # the step that was captured has added what is to be repeated; each commit takes it
            inputs = replace(inputs, attention=tuple(replace(a, replay=replay.copy()) for a in inputs.attention))
        return PathOutput(hidden, inputs=inputs)

    def _needs_loading(self, shape: VerifyShape) -> bool:
        return True

    def _lay_out_padding(self, shape: VerifyShape) -> bool:
        buffers, pad_row = self._batch.buffers, self._batch.pad_row
        buffers.rows.fill_(pad_row)
        buffers.draw_rows.fill_(pad_row)
        buffers.offsets.zero_()
        places = torch.arange(shape.tokens, dtype=torch.int32, device=buffers.rows.device)
        buffers.picks[: shape.tokens] = places
        for starts in (buffers.query_starts, buffers.place_starts):
            starts[: shape.rows] = places[: shape.rows]
            starts[shape.rows] = shape.tokens
        return True

    def _step(self, shape: VerifyShape) -> None:
        batch, passed = self._batch, self._forward(shape)
        for start in range(0, shape.tokens, LOGIT_ROWS):
            part = slice(start, min(start + LOGIT_ROWS, shape.tokens))
            batch.draw_places(self._model.logits(passed.hidden[part]), batch.buffers.draw_rows[part], start)
        counts = batch.verify_draws(shape.rows)
        if (replay := passed.inputs.attention[0].replay) is not None:
            replay.commit(counts.to(torch.int32))
        if shape.proposals:
            rows, starts = batch.buffers.rows[: shape.rows], batch.buffers.query_starts[: shape.rows]
            self._propose(shape, passed, rows, starts + counts - 1, batch.drawn_places(shape.tokens))

    def _forward(self, shape: VerifyShape) -> CapturedForward:
        rows, drafts, width, *_ = shape
        inputs = self._batch.empty_inputs(rows, shape.tokens, rows, width, 0, drafts=drafts, width=width)
        self._batch.expand(inputs)
        return self._compute(shape, inputs)


class CapturedMixedPath(_CapturedPath):
    """Steps with a few short prompts and any decodes, padded to a `MixedShape`."""

    PLAIN_KINDS = RowKind.RANDOM

    def fit(self, plan: StepPlan) -> MixedShape | None:
        if plan.num_decodes == len(plan.rows) or plan.num_drafts or not self._only_samples(plan):
            return None
        if plan.splices or plan.visible or len(plan.positions):
            return None  # of images: such a step is launched kernel by kernel
        batch, proposals = self._batch, self._proposals(plan)
        shape = shape_of(plan, LONG_CONTEXT, self._will_be_grouped(plan), batch.max_rows, len(batch.buffers.tokens))
        adapted = self._is_adapted(plan)
        if shape is None or adapted is None:
            return None
        return replace(shape, proposals=proposals, adapted=adapted) if proposals or adapted else shape

    def pad(self, plan: StepPlan, shape: MixedShape) -> tuple[StepPlan, int]:
        return pad_plan(plan, shape, self._batch.pad_row), 0

    def run(self, plan: StepPlan, shape: MixedShape) -> PathOutput:
        if not self._is_last_stage:
            return PathOutput(self._run_forward(shape).hidden)
        if not self._is_plain(plan):
            return PathOutput(self._run_forward(shape).hidden[: len(plan.samples)], last_only=True)
        self._run_step(shape)
        return PathOutput(None)

    @torch.inference_mode()
    def capture_some(self) -> None:
        """Capture a few shapes, and all of a prompt alone, so that the first request does not wait for it. Others are
        captured when first needed, with kernels that are loaded here."""
        some = [(WARM_DECODES, tokens, is_long) for tokens, is_long in itertools.product(WARM_TOKENS, (False, True))]
        shapes = [MixedShape(*one, grouped=False) for one in (*some, *((0, tokens, False) for tokens in TOKENS))]
        if self._batch.adapters is not None:
            shapes += [replace(shape, adapted=True) for shape in shapes]
        for shape in shapes:
            if self._lay_out_padding(shape):
                self._capture(shape)

    def _lay_out_padding(self, shape: MixedShape) -> bool:
        buffers = self._batch.buffers
        if shape.draws > self._batch.max_rows or shape.tokens > len(buffers.tokens):
            return False
        buffers.rows.fill_(self._batch.pad_row)
        buffers.draw_rows.fill_(self._batch.pad_row)
        buffers.picks.zero_()
        buffers.tokens.zero_()
        buffers.following.fill_(-1)
        starts = torch.arange(shape.rows + 1, dtype=torch.int32, device=buffers.rows.device).clamp(max=shape.decodes)
        starts[-1] = shape.decodes + shape.tokens
        buffers.query_starts[: shape.rows + 1] = starts
        return True

    def _only_samples(self, plan: StepPlan) -> bool:
        """Whether rows with prompt tokens yield only sampled tokens in this step, and, if drafts are proposed after it,
        every row is sampled inside the graph. New rows are not in `kinds` yet."""
        added = {new.row: RowKind.of(new) for new in plan.add}
        refused, first = RowKind.PROMPT_LOGPROBS | RowKind.POOLED, plan.num_decodes
        if self._proposals(plan):
            refused, first = ~self.PLAIN_KINDS, 0
        kinds = [added.get(row, self._batch.kinds[row]) for row in plan.rows[first:].tolist()]
        return not any(kind & refused for kind in kinds)

    def _step(self, shape: MixedShape) -> None:
        batch, passed = self._batch, self._forward(shape)
        rows, picks = batch.buffers.draw_rows[: shape.draws], batch.buffers.picks[: shape.draws]
        hidden = passed.hidden[picks] if shape.proposals else passed.hidden
        batch.draw(None, self._model.logits(hidden), rows, 0, filtered=False)
        if shape.proposals:
            self._propose(shape, passed, rows, picks, self._following(shape, passed.inputs.tokens))

    def _following(self, shape: MixedShape, tokens: torch.Tensor) -> torch.Tensor:
        """The token after each: the next of its chunk, the one drawn there, or the one that the plan names."""
        buffers, pad_row = self._batch.buffers, self._batch.pad_row
        following = torch.nn.functional.pad(tokens.roll(-1), (0, 1))  # one more, for what padding rows would write
        rows, picks = buffers.draw_rows[: shape.draws].long(), buffers.picks[: shape.draws].long()
        following[torch.where(rows == pad_row, shape.num_tokens, picks)] = self._batch.last_token[rows]
        given = buffers.following[: shape.rows - shape.decodes].long()
        ends = buffers.query_starts[shape.decodes + 1 : shape.rows + 1].long() - 1
        following[torch.where(given < 0, shape.num_tokens, ends)] = given.clamp(min=0)
        return following[:-1]

    def _forward(self, shape: MixedShape) -> CapturedForward:
        """One hidden state per draw; of all tokens if another pipeline stage follows, or a proposer."""
        batch, tokens = self._batch, shape.num_tokens
        context = LONG_CONTEXT + 1 if shape.is_long else 1
        inputs = batch.empty_inputs(shape.rows, tokens, shape.decodes, shape.tokens, context, shape.grouped)
        batch.expand(inputs)
        if not self._is_last_stage or shape.proposals:
            return self._compute(shape, inputs)
        if not self._model.supports_last_tokens or shape.adapted:  # slots are those of all tokens
            hidden = self._compute(shape, inputs).hidden[batch.buffers.picks[: shape.draws]]
            return CapturedForward(hidden, inputs)
        inputs.attention[0].last = batch.captured_last_tokens(shape.draws, inputs)
        return self._compute(shape, inputs)


def captured_paths(
    model: CausalLM, batch: CudaBatch, max_rows: int, is_last_stage: bool, reads_groups: bool,
    proposer: DeviceProposer | None = None, encoder: Any | None = None,
) -> list[StepPath]:  # fmt: skip
    """The captured paths, most of their graphs captured. `reads_groups`: steps may have prefix groups. `encoder`: of
    images, captured too if it can be."""
    pool = GraphPool(batch)
    sizes = capture_sizes(min(max_rows, 1024))
    decode = CapturedDecodePath(model, batch, pool, is_last_stage, sizes, proposer)
    mixed = CapturedMixedPath(model, batch, pool, is_last_stage, proposer)
    decode.capture_all(reads_groups)
    mixed.capture_some()
    _capture_encoder(encoder, pool)
    torch.cuda.empty_cache()  # memory of the warm-up runs
    if not batch.speculates:
        return [decode, mixed]
    return [decode, CapturedVerifyPath(model, batch, pool, is_last_stage, sizes, proposer), mixed]


def _capture_encoder(encoder: Any | None, pool: GraphPool) -> None:
    """Capture an encoder of images, if it can be; without graphs it works too."""
    capture = getattr(encoder, "capture", None)
    if capture is None:
        return
    try:
        with torch.inference_mode():
            capture(pool)
    except RuntimeError as error:
        logger.warning("images are encoded without CUDA graphs: %s", error)


def _take_stream(owner: GraphPool) -> torch.cuda.Stream:
    """A stream to capture on, returned to the spare ones when its owner is collected."""
    spare = _spare_streams.setdefault(torch.cuda.current_device(), [])
    stream = spare.pop() if spare else torch.cuda.Stream()
    weakref.finalize(owner, spare.append, stream)
    return stream
