"""Paged attention on an NVIDIA GPU: one kernel for rows of one token, one for longer ones."""

from __future__ import annotations

import torch

from quire.kernels.triton.decode_attention import DecodeAttention
from quire.kernels.triton.prefill_attention import plan_tiles, prefill_attention, prefill_tile
from quire.layers.attention.base import AttentionInputs


class TritonPagedAttention:
    """Plans each step once, in its first layer, on the device; the other layers read the plan."""

    graph_safe = True
    batch_invariant = False
    """Whether a row's bits may not depend on what else is in the batch."""

    def __init__(self) -> None:
        self._decode: dict[tuple, DecodeAttention] = {}

    def prepare(self, heads: int, kv: torch.Tensor, inputs: AttentionInputs, window: int | None) -> None:
        if inputs.rows is None:
            inputs.rows = torch.arange(inputs.num_rows, dtype=torch.int32, device=kv.device)
        key = ("decode", window)
        if inputs.num_decodes and key not in inputs.plans:
            kernel = self._decode_kernel(heads, kv, inputs)
            plan = kernel.plan(inputs.context_lens, inputs.rows, inputs.num_decodes, window)
            inputs.plans[key] = (kernel, plan)
        if inputs.num_decodes < inputs.num_rows and "tiles" not in inputs.plans:
            tokens = prefill_tile(kv.shape[4], kv.dtype.itemsize).tokens(heads // kv.shape[2])
            inputs.plans["tiles"] = plan_tiles(
                inputs.query_starts, inputs.context_lens, inputs.rows, inputs.num_decodes, inputs.num_rows,
                inputs.num_tokens, tokens,
            )  # fmt: skip

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, inputs: AttentionInputs, scale: float, window: int | None
    ) -> torch.Tensor:
        tokens, heads, head_dim = q.shape
        out = torch.empty(tokens, heads * head_dim, dtype=q.dtype, device=q.device)
        if inputs.num_decodes:
            kernel, plan = inputs.plans["decode", window]
            kernel.attend(
                q, kv, out, inputs.block_tables, inputs.rows, inputs.context_lens, plan, inputs.num_decodes, scale,
                window,
            )  # fmt: skip
        if inputs.num_decodes < inputs.num_rows:
            prefill_attention(q, kv, out, inputs.block_tables, inputs.plans["tiles"], scale, window)
        return out

    def _decode_kernel(self, heads: int, kv: torch.Tensor, inputs: AttentionInputs) -> DecodeAttention:
        _, _, kv_heads, _, head_dim = kv.shape
        key = (heads, kv_heads, head_dim, kv.dtype, len(inputs.block_tables))
        if key not in self._decode:
            self._decode[key] = DecodeAttention(
                heads, kv_heads, head_dim, len(inputs.block_tables), kv.dtype, kv.device, self.batch_invariant
            )
        return self._decode[key]
