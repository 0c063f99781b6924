"""Kernels compiled before the first request, many at once, while the weights are read.

Triton compiles a kernel when it is first launched, in a second or so, and keeps it on disk. One after the other that
would be most of a first start. Its compiler works outside Python's lock, so threads help.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from quire.kernels.base import Ops
from quire.layers.attention.layer import Attention
from quire.layers.embedding import LMHead
from quire.layers.linear import FusedLinear, RowParallelLinear

logger = logging.getLogger(__name__)

Task = Callable[[], object]


class WarmUp:
    """Compilations under way."""

    def __init__(self, tasks: list[Task]) -> None:
        self._pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="compile")
        self._futures: list[Future[object]] = [self._pool.submit(task) for task in tasks]

    def wait(self) -> None:
        """Until all are done. One that fails is no harm: whoever launches the kernel compiles it, or learns why not."""
        for future in self._futures:
            if (error := future.exception()) is not None:
                logger.debug("a kernel was not compiled ahead: %s", error)
        self._pool.shutdown()


def warm_up(model: nn.Module, ops: Ops, max_rows: int) -> WarmUp:
    """Start compiling what the model's layers launch. The weights need not be filled."""
    return WarmUp(list(_products(model, ops, max_rows)) + list(_row_kernels(model, ops)))


def _products(model: nn.Module, ops: Ops, max_rows: int) -> Iterator[Task]:
    compile_product = getattr(ops, "compile_product", None)
    if compile_product is None:
        return
    seen = set()
    for module in model.modules():
        if isinstance(module, (FusedLinear, RowParallelLinear, LMHead)):
            normed = isinstance(module, FusedLinear)
            gated = normed and module.gated
            bias = getattr(module, "bias", None) is not None
            key = (tuple(module.weight.shape), normed, gated, bias)
            if key not in seen:
                seen.add(key)
                yield from compile_product(module.weight, normed, gated, bias, max_rows)


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
