"""Compiles kernels before the first request, many at once, while the weights are read.

Triton compiles a kernel when it is first launched, in a second or so, and keeps it on disk. One after the other that
would be most of a first start; `kernels/triton/compiler.py` compiles them in parallel.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

from quire.kernels.adapters import NO_SLOT, SlotTokens
from quire.kernels.kv import LayerKV, QuantizedKV, format_of
from quire.kernels.triton import low_rank
from quire.kernels.triton.compiler import Compilers, Task
from quire.kernels.triton.kv_widen import MIN_QUERIES
from quire.kernels.triton.launch import let_threads_launch
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.prefill_attention import LONG_CONTEXT
from quire.layers.adapters import MatrixSlots
from quire.layers.attention.base import AttentionInputs
from quire.layers.attention.latent import LatentAttention
from quire.layers.attention.layer import Attention
from quire.layers.caches import StateView
from quire.layers.gemm_shapes import kind_of, layer_experts, layer_gemms
from quire.layers.linear import FusedLinear
from quire.layers.moe import SparseMLP
from quire.layers.recurrent import Recurrence
from quire.messages.plan import MAX_WIDTH
from quire.worker.cuda_batch import CudaBatch
from quire.worker.geometry import cache_layers
from quire.worker.verify_steps import NARROW

logger = logging.getLogger(__name__)


class WarmUp:
    """Compilations in progress, of kernels that are not on disk yet."""

    def __init__(self, tasks: Sequence[Task], identity: str, device: torch.device) -> None:
        self._tasks = tasks
        self._device = device
        self._compilers = Compilers(tasks, identity)

    def wait(self) -> None:
        """Wait until all are compiled and loaded. A failure is only logged: launching the kernel raises it."""
        self._compilers.wait()
        let_threads_launch()
        workers = min(16, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers, "load", torch.cuda.set_device, (self._device,)) as pool:
            for future in [pool.submit(task) for task in self._tasks]:
                if (error := future.exception()) is not None:
                    logger.debug("a kernel was not compiled ahead: %s", error)


def warm_up(
    model: nn.Module, ops: TritonOps, batch: CudaBatch, max_tokens: int, grouped: bool, proposer: object = None
) -> WarmUp:
    """Start compiling what a step launches, and what a proposer does after it. The weights need not be filled; `batch`
    is not in use."""
    # The longest first: attention.
    experts = _expert_kernels(model, ops, max_tokens)
    drafts = proposer if isinstance(proposer, nn.Module) else None
    tasks = [
        *_attention_kernels(_attention_layers(model, batch) + _draft_layers(drafts, batch), batch, grouped),
        *_latent_kernels(model, batch),
        *_state_kernels(model, batch),
        *experts.values(),
        *_sampling_kernels(model, batch),
        *_row_kernels(model, ops, batch),
        *_adapter_kernels(ops, batch, max_tokens),
    ]
    gemms = layer_gemms(model) + ([] if drafts is None else layer_gemms(drafts))
    jobs = [job for gemm in gemms for job in ops.kernels_of(*gemm, max_tokens)]
    modules = [*model.modules(), *(() if drafts is None else drafts.modules())]
    layers = {_shape(module) for module in modules if isinstance(module, Attention | LatentAttention)}
    layers |= {module.shape for module in model.modules() if isinstance(module, Recurrence)}
    weights = {(kind_of(gemm.weight), *gemm[1:]) for gemm in gemms}
    kv = batch.kv.data
    identity = (
        f"{type(ops)} {sorted(map(str, {*layers, *weights, *experts, *jobs}))} {kv.shape[1:]} {batch.kv.geometry} "
        f"{batch.block_tables.shape} {batch.vocab_size} {grouped} {batch.speculates} "
        f"{None if batch.adapters is None else batch.adapters.slots.space}"
    )
    return WarmUp([*tasks, *(job.compile for job in jobs)], identity, batch.kv.data.device)


def _adapter_kernels(ops: TritonOps, batch: CudaBatch, max_tokens: int) -> Iterator[Task]:
    """Products with adapters, over tokens that have none."""
    if batch.adapters is None:
        return
    shapes = {(slots.a.shape, slots.b.shape, slots.bounds): slots for slots in batch.adapters.slots.layers}
    for slots in shapes.values():
        for tokens in (1, 2, 4, 8, *low_rank.LOADING_TOKENS):
            if tokens <= max_tokens:
                yield functools.partial(_adapt, ops, slots, tokens)


@torch.inference_mode()
def _adapt(ops: TritonOps, slots: MatrixSlots, tokens: int) -> None:
    layer, space = slots.layer, slots.space
    none = torch.full((tokens,), NO_SLOT, dtype=torch.int32, device=space.device)
    x = torch.zeros(tokens, slots.a.shape[2], dtype=layer.weight.dtype, device=space.device)
    norm, activation = None, ""
    if isinstance(layer, FusedLinear):
        activation = layer.activation if layer.gated else ""
        norm = (torch.ones_like(x[0]), 1e-5) if layer.normed else None
    residual = None if norm is None else torch.zeros_like(x)
    low = slots.low_rank(SlotTokens(none, ()))
    if tokens > low_rank.FEW_TOKENS:  # the product itself is one of the base's
        out = x.new_zeros(tokens, slots.bounds[-1])
        low_rank.expand(low_rank.shrink(x, low), low, out, activation)
        return
    ops.adapted_linear(x, layer.weight, getattr(layer, "bias", None), low, norm, residual, activation)


def _shape(layer: Attention | LatentAttention) -> tuple[object, ...]:
    if isinstance(layer, LatentAttention):
        return layer.num_heads, layer.shape
    spec = layer.spec
    flags = spec.window, spec.soft_cap, spec.sinks is None, spec.slopes is None, layer.norms is None
    return layer.num_heads, layer.num_kv_heads, layer.head_dim, *flags


def _attention_layers(model: nn.Module, batch: CudaBatch) -> list[tuple[Attention, LayerKV]]:
    """The attention layers, each with its cache."""
    pairs = zip(cache_layers(model), batch.kv.layers, strict=False)
    return [(layer, kv) for layer, kv in pairs if isinstance(layer, Attention)]


def _draft_layers(proposer: nn.Module | None, batch: CudaBatch) -> list[tuple[Attention, LayerKV]]:
    """The same of a proposer."""
    found = [] if proposer is None else [module for module in proposer.modules() if isinstance(module, Attention)]
    return list(zip(found, batch.kv.proposer_layers, strict=False))


def _attention_kernels(
    found: list[tuple[Attention, LayerKV]], batch: CudaBatch, grouped: bool
) -> Iterator[Task]:  # fmt: skip
    """Attention over rows without tokens: one query, several, drafts, long contexts, prefix groups."""
    layers = {(*_shape(layer), format_of(kv)): (layer, kv) for layer, kv in found}
    many = len(batch.buffers.rows) - 1
    for layer, kv in layers.values():
        kinds = [False, True] if grouped and layer.spec.window is None else [False]
        for is_grouped in kinds:
            yield functools.partial(_attend, layer, kv, batch, 1, 1, 1, 0, is_grouped)
        yield functools.partial(_attend, layer, kv, batch, 1, 2, 0, 2, False)
        yield functools.partial(_attend, layer, kv, batch, 1, 2, 0, LONG_CONTEXT + 1, False)
        if isinstance(kv, QuantizedKV):
            # Prompts whose blocks are converted to 16 bits first.
            yield functools.partial(_attend, layer, kv, batch, 1, MIN_QUERIES, 0, MIN_QUERIES, False)
            yield functools.partial(_attend, layer, kv, batch, 1, MIN_QUERIES, 0, LONG_CONTEXT + 1, False)
        for is_grouped in kinds:
            for rows in (33, 257):  # plans of more rows; the attention kernel is the same
                if rows <= many:
                    yield functools.partial(_plan, layer, kv, batch, rows, rows, rows, 0, is_grouped)
        if not batch.speculates:
            continue
        for width in (NARROW, MAX_WIDTH):
            yield functools.partial(_attend, layer, kv, batch, 1, width, 1, 0, False, width)
            for rows in (33, 257):
                if rows <= many:
                    yield functools.partial(_plan, layer, kv, batch, rows, rows * width, rows, 0, False, width)


def _latent_kernels(model: nn.Module, batch: CudaBatch) -> Iterator[Task]:
    """The same for latent attention, from one layer: all have the same shape."""
    pairs = zip(cache_layers(model), batch.kv.layers, strict=False)
    found = next(((layer, kv) for layer, kv in pairs if isinstance(layer, LatentAttention)), None)
    if found is None:
        return
    layer, kv = found
    many = len(batch.buffers.rows) - 1
    for rows, tokens, decodes in ((1, 1, 1), (1, 2, 0), (17, 17, 17), (33, 33, 33), (257, 257, 257)):
        if rows <= many:
            yield functools.partial(_attend_latents, layer, kv, batch, rows, tokens, decodes)


@torch.inference_mode()
def _attend_latents(
    layer: LatentAttention, kv: torch.Tensor, batch: CudaBatch, rows: int, tokens: int, decodes: int
) -> None:
    inputs = batch.empty_inputs(rows, tokens, decodes, tokens, 0).attention[0]
    inputs.of(layer.group).context_lens.zero_()
    inputs.of(layer.group).slots.zero_()
    wide = torch.zeros(
        tokens, layer.num_heads * layer.shape.query + layer.shape.width, dtype=kv.dtype, device=kv.device
    )
    q, latent = wide.tensor_split((wide.shape[1] - layer.shape.width,), dim=1)
    layer(q, latent, torch.zeros(tokens, dtype=torch.int64, device=kv.device), kv, inputs)


@torch.inference_mode()
def _plan(
    layer: Attention, kv: LayerKV, batch: CudaBatch, rows: int, tokens: int, decodes: int, max_context: int,
    grouped: bool, width: int = 1,
) -> AttentionInputs:  # fmt: skip
    drafts = decodes * (width - 1)
    step = batch.empty_inputs(rows, tokens, decodes, tokens, max_context, grouped, drafts, width)
    inputs = step.attention[layer.group]
    inputs.context_lens.zero_()
    layer.backend.prepare(layer.num_heads, layer.scaled(kv), inputs, layer.spec)
    return inputs


@torch.inference_mode()
def _attend(
    layer: Attention, kv: LayerKV, batch: CudaBatch, rows: int, tokens: int, decodes: int, max_context: int,
    grouped: bool, width: int = 1,
) -> None:  # fmt: skip
    inputs = _plan(layer, kv, batch, rows, tokens, decodes, max_context, grouped, width)
    kv = layer.scaled(kv)
    width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    qkv = torch.zeros(tokens, width, dtype=kv.dtype, device=kv.device)
    q = qkv[:, : layer.num_heads * layer.head_dim].view(tokens, layer.num_heads, layer.head_dim)
    layer.backend.attend(q, kv, inputs, layer.spec)


def _state_kernels(model: nn.Module, batch: CudaBatch) -> Iterator[Task]:
    """Recurrent layers over rows without tokens: decodes, prompts of one row and of many."""
    pairs = zip(cache_layers(model), batch.kv.layers, strict=False)
    layers = {layer.shape: (layer, states) for layer, states in pairs if isinstance(layer, Recurrence)}
    many = len(batch.buffers.rows) - 1
    for layer, states in layers.values():
        for rows, tokens, decodes in ((1, 1, 1), (1, 2, 0), (many, 2 * many, 0)):
            yield functools.partial(_recur, layer, states, batch, rows, tokens, decodes)


@torch.inference_mode()
def _recur(layer: Recurrence, states: StateView, batch: CudaBatch, rows: int, tokens: int, decodes: int) -> None:
    inputs = batch.empty_inputs(rows, tokens, decodes, 2, 0).attention[layer.group]
    inputs.context_lens.zero_()
    layer(torch.zeros(tokens, layer.in_width, dtype=layer.conv.dtype, device=layer.conv.device), states, inputs)


def _expert_kernels(model: nn.Module, ops: TritonOps, max_tokens: int) -> dict[object, Task]:
    """One token of zeros through experts of each shape, by every kernel a step may use."""
    tasks: dict[object, Task] = {}
    for experts in layer_experts(model):
        made = ops.expert_kernels_of(*experts[:5], max_tokens, experts.variant)
        tasks |= {(experts.kind, kernel): task for kernel, task in made.items()}
    for module in model.modules():
        if isinstance(module, SparseMLP) and module.rule is not None:
            tasks.setdefault(("route", module.routing, module.rule), functools.partial(_route, module))
    return tasks


def _route(module: SparseMLP) -> None:
    routing, router = module.routing, module.router
    logits = torch.zeros(1, router.shape[0], dtype=router.dtype, device=router.device)
    counts = torch.zeros(routing.num_experts, dtype=torch.int64, device=router.device)
    module.ops.route(logits, routing.top_k, routing.renormalise, counts, counts[:1], module.rule)


def _sampling_kernels(model: nn.Module, batch: CudaBatch) -> Iterator[Task]:
    """Draws for the padding row, which do nothing, and the layout of steps of padding rows."""
    rows = torch.full((1,), batch.pad_row, dtype=torch.int32, device=batch.buffers.rows.device)
    dtype = next(
        (module.dtype for module in model.modules() if isinstance(module, Attention | LatentAttention)), torch.float32
    )
    logits = torch.zeros(1, batch.vocab_size, dtype=dtype, device=rows.device)
    token, invalid = rows.long(), rows.bool()
    for drawn in (logits, logits.float()):  # unchanged, and after penalties and lists
        yield functools.partial(batch.draw, None, drawn, rows, 0, filtered=True)
        yield functools.partial(batch.draw, None, drawn, rows, 0, filtered=False)
    yield lambda: batch.commit(token, invalid, rows.long(), 0)
    indices, words = np.zeros(1, np.int32), np.zeros((1, -(-batch.vocab_size // 32)), np.int32)
    yield lambda: batch.mask(logits.clone(), indices, words)
    yield lambda: batch.expand(batch.empty_inputs(1, 1, 1, 1, 0))
    yield lambda: batch.expand(batch.empty_inputs(1, 2, 0, 2, 0))
    yield batch.apply_nothing
    if batch.speculates:
        for drawn in (logits, logits.float()):
            yield functools.partial(batch.draw_places, drawn, rows, 0, filtered=True)
            yield functools.partial(batch.draw_places, drawn, rows, 0, filtered=False)
        yield lambda: batch.expand(batch.empty_inputs(1, 2, 1, 2, 0, drafts=1, width=2))
        yield lambda: batch.verify_nothing()


def _row_kernels(model: nn.Module, ops: TritonOps, batch: CudaBatch) -> Iterator[Task]:
    """The row-wise kernels, on two rows of zeros."""
    attention, kv = next(iter(_attention_layers(model, batch)), (None, None))
    fused = next((module for module in model.modules() if isinstance(module, FusedLinear)), None)
    if fused is None:
        return
    weight = fused.weight

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    width = weight.shape[1]
    yield lambda: ops.rms_norm(zeros(2, width), zeros(width), 1e-5)
    yield lambda: ops.add_rms_norm(zeros(2, width), zeros(2, width), zeros(width), 1e-5)
    gate_up = next((module for module in model.modules() if isinstance(module, FusedLinear) and module.gated), None)
    if gate_up is not None:
        yield lambda: ops.gate_mul(zeros(2, gate_up.weight.shape[0]), gate_up.activation)
    if attention is None or kv is None:
        return
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    places = torch.zeros(2, dtype=torch.int64, device=weight.device)
    yield lambda: ops.prepare_qkv(
        zeros(2, (heads + 2 * kv_heads) * dim), places, attention.cos_sin, attention.norms,
        attention.scaled(kv), places, heads, kv_heads, dim,
    )  # fmt: skip
