"""Paged attention on a CPU: one native call per layer (`kernels/cpu/attention.cpp`)."""

from __future__ import annotations

import torch

from quire.kernels.cpu.build import library
from quire.kernels.kv import LayerKV, QuantizedKV
from quire.layers.attention.base import AttentionInputs, AttentionSpec
from quire.layers.attention.torch_paged import TorchPagedAttention


class CpuPagedAttention(TorchPagedAttention):
    """Native for float32 and bfloat16; other dtypes, caches in few bits, and machines without a compiler, use the torch
    backend.

    A token's bits depend only on its own row: not on the batch, the threads, or the chunks of its prompt.
    """

    def __init__(self) -> None:
        native = library()
        self.is_native = native is not None
        self._attend = native.kernel("attend") if native else {}

    def attend(self, q: torch.Tensor, kv: LayerKV, inputs: AttentionInputs, spec: AttentionSpec) -> torch.Tensor:
        if isinstance(kv, QuantizedKV):
            return super().attend(q, kv, inputs, spec)
        dtype = q.dtype
        kernel = self._attend.get(dtype)
        tokens, heads, head_dim = q.shape
        q_stride, head_stride, _ = q.stride()
        block_stride, _, _, slot_stride, _ = kv.stride()
        if kernel is None or kv.dtype != dtype or head_stride != head_dim or slot_stride != head_dim:
            return super().attend(q, kv, inputs, spec)
        ahead = inputs.seen_ahead(spec)
        if ahead is not None and spec.slopes is not None:
            return super().attend(q, kv, inputs, spec)
        sinks = spec.sinks
        if sinks is not None and sinks.dtype != dtype:
            sinks = sinks.to(dtype)
        run, pack = kernel
        _, _, kv_heads, block_size, _ = kv.shape
        tables = inputs.block_tables
        out = q.new_empty(tokens, heads * head_dim)
        run(
            pack(
                q.data_ptr(),
                kv.data_ptr(),
                out.data_ptr(),
                inputs.query_starts.data_ptr(),
                inputs.context_lens.data_ptr(),
                tables.data_ptr(),
                0 if sinks is None else sinks.data_ptr(),
                0 if spec.slopes is None else spec.slopes.data_ptr(),
                0 if ahead is None else ahead.data_ptr(),
                inputs.num_rows,
                heads,
                kv_heads,
                head_dim,
                block_size,
                q_stride,
                block_stride,
                tables.size(1),
                tables.stride(0),
                spec.window or 0,
                spec.scale,
                spec.soft_cap or 0.0,
                torch.get_num_threads(),
            )
        )
        return out
