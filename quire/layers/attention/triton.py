"""Paged attention on an NVIDIA GPU: a decode kernel for rows of one token, and of a few that verify drafts; a prefill
kernel for longer ones."""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ConfigError
from quire.kernels.kv import LayerKV, QuantizedKV, format_of
from quire.kernels.triton.decode_attention import DecodeAttention, verified_queries
from quire.kernels.triton.kv_widen import MIN_QUERIES, WidePlan, plan_wide, widen
from quire.kernels.triton.prefill_attention import LONG_CONTEXT, plan_tiles, prefill_attention, prefill_tile
from quire.kernels.triton.prefix_attention import PrefixAttention
from quire.layers.attention.base import (
    AttentionInputs,
    AttentionSpec,
    LatentBackend,
    LatentShape,
    PrefixGroupBackend,
)


class TritonPagedAttention(PrefixGroupBackend):
    """Plans each step once, in its first layer, on the device; the other layers read the plan.

    Layers with a sliding window ignore prefix groups: they see too little of the shared blocks. So do steps that verify
    drafts.
    """

    graph_safe = True

    def __init__(self, batch_invariant: bool = False) -> None:
        """`batch_invariant`: a token's bits depend only on its own row. Then all rows go through the prefill kernel,
        which sums in cache order for any chunking of the prompt and any other rows."""
        self._invariant = batch_invariant
        self._kernels: dict[tuple, Any] = {}

    def latent(self, heads: int, shape: LatentShape) -> LatentBackend:
        """The same for latent caches."""
        from quire.layers.attention.triton_latent import TritonLatentAttention

        if self._invariant:
            raise ConfigError(
                "batch_invariant is not implemented for latent attention: prompts and decodes sum in different orders",
                "batch_invariant",
                True,
            )
        if (heads, shape) not in self._kernels:
            self._kernels[heads, shape] = TritonLatentAttention(heads, shape)
        return self._kernels[heads, shape]

    def prepare(self, heads: int, kv: LayerKV, inputs: AttentionInputs, spec: AttentionSpec) -> None:
        if inputs.rows is None:
            inputs.rows = torch.arange(inputs.num_rows, dtype=torch.int32, device=kv.device)
        shape, window = _shape(heads, kv), spec.window
        decodes, queries = self._decodes(heads // kv.shape[2], inputs)
        if decodes and ("decode", window, shape) not in inputs.common:
            kernel = self._kernel(DecodeAttention, heads, kv, inputs, queries)
            groups = inputs.groups if window is None and queries == 1 else None
            shared = None if groups is None else groups.shared
            if groups is not None:
                prefix = self._kernel(PrefixAttention, heads, kv, inputs)
                inputs.common["prefix", window, shape] = (
                    prefix,
                    prefix.plan(
                        groups.members, groups.starts, groups.shared, inputs.rows, inputs.num_decodes,
                        kernel.tile_tokens,
                    ),
                )  # fmt: skip
            starts = inputs.query_starts if queries > 1 else None
            plan = kernel.plan(inputs.context_lens, inputs.rows, decodes, window, shared, starts)
            inputs.common["decode", window, shape] = (kernel, plan)
        if decodes < inputs.num_rows and ("tiles", shape) not in inputs.common:
            is_long = self._invariant or inputs.max_context_len > LONG_CONTEXT
            tile = prefill_tile(kv.shape[4], kv.dtype.itemsize, is_long)
            tiles = plan_tiles(
                inputs.query_starts, inputs.context_lens, inputs.rows, decodes, inputs.num_rows, inputs.num_tokens,
                tile.tokens(heads // kv.shape[2]),
            )  # fmt: skip
            inputs.common["tiles", shape] = (tiles, tile)
        if window is not None or self._invariant or decodes == inputs.num_rows or ("wide", shape) in inputs.plans:
            return
        if isinstance(kv, QuantizedKV) and kv.unit_scales:
            inputs.plans["wide", shape] = self._plan_wide(kv, inputs, decodes)

    def attend(self, q: torch.Tensor, kv: LayerKV, inputs: AttentionInputs, spec: AttentionSpec) -> torch.Tensor:
        tokens, heads, head_dim = q.shape
        shape, scale, window = _shape(heads, kv), spec.scale, spec.window
        out = torch.empty(tokens, heads * head_dim, dtype=q.dtype, device=q.device)
        decodes, queries = self._decodes(heads // kv.shape[2], inputs)
        if decodes:
            state = None
            if inputs.groups is not None and ("prefix", window, shape) in inputs.common:
                prefix, tiles = inputs.common["prefix", window, shape]
                state = prefix.attend(
                    q, kv, inputs.block_tables, inputs.groups.shared, tiles, scale, spec.soft_cap, spec.slopes
                )
            kernel, plan = inputs.common["decode", window, shape]
            kernel.attend(
                q, kv, out, inputs.block_tables, inputs.rows, inputs.context_lens, plan, decodes, scale, window,
                state, spec.soft_cap, spec.sinks, spec.slopes, inputs.query_starts if queries > 1 else None,
            )  # fmt: skip
        if decodes < inputs.num_rows:
            tiles, tile = inputs.common["tiles", shape]
            wide: WidePlan | None = inputs.plans.get(("wide", shape)) if window is None else None
            tables = inputs.block_tables
            if wide is not None:
                assert isinstance(kv, QuantizedKV) and inputs.rows is not None
                kv = widen(kv, tables, inputs.rows, inputs.context_lens, inputs.num_rows, wide)
                tables = wide.tables
            prefill_attention(
                q, kv, out, tables, tiles, scale, window, tile, spec.soft_cap, spec.sinks, spec.slopes,
                inputs.seen_ahead(spec),
            )  # fmt: skip
        return out

    def _plan_wide(self, kv: QuantizedKV, inputs: AttentionInputs, decodes: int) -> WidePlan | None:
        """How the rows' blocks are converted to 16 bits for the prefill kernel; None: it reads codes."""
        if inputs.max_query_len < MIN_QUERIES or kv.dtype.itemsize != 2:
            return None
        assert inputs.rows is not None
        return plan_wide(kv, inputs.block_tables, inputs.rows, decodes, inputs.num_rows, inputs.max_context_len)

    def _decodes(self, group: int, inputs: AttentionInputs) -> tuple[int, int]:
        """How many rows, from the first, go through the decode kernel, and most query tokens of each that it takes."""
        if self._invariant:
            return 0, 1
        if not inputs.num_verifying:
            return inputs.num_decodes, 1
        queries = verified_queries(group, inputs.width)
        return (inputs.num_verifying, queries) if queries else (0, 1)

    def _kernel(self, kind: type, heads: int, kv: LayerKV, inputs: AttentionInputs, queries: int = 1) -> Any:
        """The kernel for heads of this shape, with its workspace; made when first used."""
        _, _, kv_heads, _, head_dim = kv.shape
        rows = max(len(inputs.block_tables) - 1, inputs.num_rows)  # the last one is padding
        quantized = format_of(kv).codes is not None
        key = (kind, heads, kv_heads, head_dim, kv.dtype, quantized, rows, queries)
        if key not in self._kernels:
            more = {"queries": queries} if queries > 1 else {}
            self._kernels[key] = kind(heads, kv_heads, head_dim, rows, kv.dtype, kv.device, quantized=quantized, **more)
        return self._kernels[key]


def _shape(heads: int, kv: LayerKV) -> tuple[int, int, int, bool]:
    """What a step's plans depend on besides the window: layers may differ."""
    return heads, kv.shape[2], kv.shape[4], isinstance(kv, QuantizedKV)
