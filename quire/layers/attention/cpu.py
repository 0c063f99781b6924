"""Paged attention on a CPU: one native call a layer (`kernels/cpu/attention.cpp`)."""

from __future__ import annotations

import torch

from quire.kernels.cpu.build import library
from quire.layers.attention.base import AttentionInputs
from quire.layers.attention.torch_paged import TorchPagedAttention


class CpuPagedAttention(TorchPagedAttention):
    """Native for float32 and bfloat16; other dtypes, and machines without a compiler, use the torch backend.

    A token's bits depend on its own row alone: not on the batch, the threads, or how its prompt was cut into steps.
    """

    def __init__(self) -> None:
        native = library()
        self.is_native = native is not None
        self._attend = native.kernel("attend") if native else {}

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, inputs: AttentionInputs, scale: float, window: int | None
    ) -> torch.Tensor:
        dtype = q.dtype
        kernel = self._attend.get(dtype)
        tokens, heads, head_dim = q.shape
        if kernel is None or kv.dtype != dtype or q.stride(1) != head_dim or kv.stride(3) != head_dim:
            return super().attend(q, kv, inputs, scale, window)
        tables = inputs.block_tables
        out = torch.empty((tokens, heads * head_dim), dtype=dtype)
        kernel(
            q.data_ptr(),
            kv.data_ptr(),
            out.data_ptr(),
            inputs.query_starts.data_ptr(),
            inputs.context_lens.data_ptr(),
            tables.data_ptr(),
            inputs.num_rows,
            heads,
            kv.size(2),
            head_dim,
            kv.size(3),
            q.stride(0),
            kv.stride(0),
            tables.size(1),
            tables.stride(0),
            scale,
            window or 0,
            torch.get_num_threads(),
        )
        return out
