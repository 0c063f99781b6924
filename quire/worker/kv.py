"""The KV cache's tensors, and copies of blocks within it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.layers.attention.base import KVSpec
from quire.platforms.base import MemoryArena


def block_bytes(spec: KVSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers of this rank, its token ids included."""
    slot = spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize + 4
    return block_size * slot


def stored_bytes(spec: KVSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block in other tiers: keys and values only. Its token ids come with the plan that moves it back."""
    return block_bytes(spec, block_size, dtype) - 4 * block_size


class KVCache:
    """Keys, values and token ids of every block.

    Block-major: one block is contiguous over all layers, so that moving it is one copy. Token ids are in pages with
    the same block numbers, so that sharing or copying a block covers its tokens too.
    """

    def __init__(
        self, spec: KVSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, spec.num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        # Zeros, because a masked slot is still multiplied by zero, and garbage could be NaN.
        memory = MemoryArena(device)
        self.data = memory.zeros(shape, dtype)
        self.layers = [self.data[:, layer] for layer in range(spec.num_layers)]
        self.tokens = memory.zeros((num_blocks, block_size), torch.int32)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks: (from, to) each."""
        if pairs:
            numbers = torch.tensor(pairs, pin_memory=self.data.is_cuda)
            sources, targets = numbers.to(self.data.device, non_blocking=True).unbind(1)
            self.data[targets] = self.data[sources]
            self.tokens[targets] = self.tokens[sources]
