"""Kernels compiled before the first request, many at once, while the weights are read.

Triton compiles a kernel when it is first launched, in a second or so, and keeps it on disk. One after the other that
would be most of a first start. Its compiler works outside Python's lock for a part of the time, so threads help; the
many small products are left to processes (`kernels/triton/compiler.py`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from quire.kernels.base import Ops
from quire.kernels.triton.compiler import Compilers
from quire.kernels.triton.prefill_attention import LONG_CONTEXT
from quire.kernels.triton.tuning import Job
from quire.layers.attention.layer import Attention
from quire.layers.linear import FusedLinear
from quire.layers.products import layer_products
from quire.worker.cuda_batch import CudaBatch

logger = logging.getLogger(__name__)

Task = Callable[[], object]


class WarmUp:
    """Compilations under way: `tasks` in threads, `jobs` in processes if they were never done, then loaded."""

    def __init__(self, tasks: list[Task], jobs: list[Job], device: torch.device) -> None:
        self._jobs = jobs
        self._compilers = Compilers(jobs)
        self._pool = ThreadPoolExecutor(
            min(16, os.cpu_count() or 1), "compile", initializer=torch.cuda.set_device, initargs=(device,)
        )
        self._futures: list[Future[object]] = [self._pool.submit(task) for task in tasks]

    def wait(self) -> None:
        """Until all are done. One that fails is no harm: whoever launches the kernel compiles it, or learns why not."""
        self._compilers.wait()
        self._futures += [self._pool.submit(job.compile) for job in self._jobs]
        for future in self._futures:
            if (error := future.exception()) is not None:
                logger.debug("a kernel was not compiled ahead: %s", error)
        self._pool.shutdown()


def warm_up(model: nn.Module, ops: Ops, batch: CudaBatch, max_tokens: int, grouped: bool) -> WarmUp:
    """Start compiling what a step launches. The weights need not be filled; `batch` is one that nobody uses."""
    # The longest first: attention.
    kernels = [*_attention_kernels(model, batch, grouped), *_row_kernels(model, ops), *_sampling_kernels(batch)]
    return WarmUp(kernels, list(_products(model, ops, max_tokens)), batch.kv.data.device)


def _attention_kernels(model: nn.Module, batch: CudaBatch, grouped: bool) -> Iterator[Task]:
    """Attention over rows that have no tokens: of one query, of several, over long contexts, of groups."""
    layers = {module.window: module for module in model.modules() if isinstance(module, Attention)}
    for layer in layers.values():
        many = len(batch.buffers.rows) - 1
        cases = [(1, 1, 1, 0, False), (1, 2, 0, 2, False), (1, 2, 0, LONG_CONTEXT + 1, False)]
        cases += [(1, 1, 1, 0, True)] if grouped and layer.window is None else []
        cases += [(rows, rows, rows, 0, False) for rows in (33, 257) if rows <= many]
        for case in cases:
            yield functools.partial(_attend, layer, batch, *case)


@torch.inference_mode()
def _attend(
    layer: Attention, batch: CudaBatch, rows: int, tokens: int, decodes: int, max_context: int, grouped: bool
) -> None:
    inputs = batch.empty_inputs(rows, tokens, decodes, tokens, max_context, grouped).attention
    inputs.context_lens.zero_()
    kv = batch.kv.layers[0]
    layer.backend.prepare(layer.num_heads, kv, inputs, layer.window)
    width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    qkv = torch.zeros(tokens, width, dtype=kv.dtype, device=kv.device)
    q = qkv[:, : layer.num_heads * layer.head_dim].view(tokens, layer.num_heads, layer.head_dim)
    layer.backend.attend(q, kv, inputs, layer.scale, layer.window)


def _sampling_kernels(batch: CudaBatch) -> Iterator[Task]:
    """Draws for the padding row, which do nothing, and the layout of a step of it."""
    rows = torch.full((1,), batch.pad_row, dtype=torch.int32, device=batch.buffers.rows.device)
    logits = torch.zeros(1, batch.vocab_size, dtype=batch.kv.data.dtype, device=rows.device)
    token, invalid = rows.long(), rows.bool()
    yield lambda: batch.draw(logits, rows, 0, filtered=False)
    yield lambda: batch.draw(logits, rows, 0, filtered=True)
    yield lambda: batch.commit(token, invalid, rows.long(), 0)
    yield lambda: batch.expand(batch.empty_inputs(1, 1, 1, 1, 0))


def _products(model: nn.Module, ops: Ops, max_tokens: int) -> Iterator[Job]:
    kernels_of = getattr(ops, "kernels_of", None)
    if kernels_of is not None:
        for product in layer_products(model):
            yield from kernels_of(*product, max_tokens)


def _row_kernels(model: nn.Module, ops: Ops) -> Iterator[Task]:
    """The row-wise kernels, on two rows of zeros."""
    attention = next((module for module in model.modules() if isinstance(module, Attention)), None)
    fused = next((module for module in model.modules() if isinstance(module, FusedLinear)), None)
    if attention is None or fused is None:
        return
    weight = fused.weight

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    width, heads, kv_heads, dim = weight.shape[1], attention.num_heads, attention.num_kv_heads, attention.head_dim
    places = torch.zeros(2, dtype=torch.int64, device=weight.device)
    yield lambda: ops.rms_norm(zeros(2, width), zeros(width), 1e-5)
    yield lambda: ops.add_rms_norm(zeros(2, width), zeros(2, width), zeros(width), 1e-5)
    gate_up = next((module for module in model.modules() if isinstance(module, FusedLinear) and module.gated), None)
    if gate_up is not None:
        yield lambda: ops.silu_mul(zeros(2, gate_up.weight.shape[0]))
    yield lambda: ops.prepare_qkv(
        zeros(2, (heads + 2 * kv_heads) * dim), places, attention.cos_sin, attention.norms,
        zeros(1, 2, kv_heads, 16, dim), places, heads, kv_heads, dim,
    )  # fmt: skip
