"""The KV cache's tensors, and copies of blocks within it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.kv import KVFormat, LayerKV, QuantizedKV
from quire.layers.attention.base import KVSpec
from quire.platforms.base import MemoryArena


def block_bytes(spec: KVSpec, block_size: int, format: KVFormat) -> int:
    """Bytes one block takes over all layers of this rank, its token ids included."""
    return stored_bytes(spec, block_size, format) + 4 * block_size


def stored_bytes(spec: KVSpec, block_size: int, format: KVFormat) -> int:
    """Bytes of a block in other tiers: keys, values and their scales. Its token ids come with the plan that moves it
    back."""
    if spec.latent_width:
        return spec.num_layers * block_size * spec.latent_width * format.dtype.itemsize
    return spec.num_layers * format.layer_bytes(spec.num_kv_heads, block_size, spec.head_dim)


class KVCache:
    """Keys, values and token ids of every block. `data` is what copies of blocks move; `layers` is what layers see.

    Block-major: one block is contiguous over all layers, so that moving it is one copy. Token ids are in pages with
    the same block numbers, so that sharing or copying a block covers its tokens too.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int, format: KVFormat, device: torch.device) -> None:
        layer = (spec.num_kv_heads, block_size, spec.head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.format = format
        # Zeros, because a masked slot is still multiplied by zero, and garbage could be NaN.
        memory = MemoryArena(device)
        self.layers: list[LayerKV]
        if spec.latent_width:
            self.data = memory.zeros((num_blocks, spec.num_layers, block_size, spec.latent_width), format.dtype)
            self.layers = list(self.data.unbind(1))
        elif format.codes is None:
            self.data = memory.zeros((num_blocks, spec.num_layers, 2, *layer), format.dtype)
            self.layers = [self.data[:, index] for index in range(spec.num_layers)]
        else:
            self.data = memory.zeros((num_blocks, stored_bytes(spec, block_size, format)), torch.uint8)
            parts = range(spec.num_layers)
            self.layers = [QuantizedKV.of_layer(self.data, index, format, *layer) for index in parts]
        self.tokens = memory.zeros((num_blocks, block_size), torch.int32)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks: (from, to) each."""
        if pairs:
            numbers = torch.tensor(pairs, pin_memory=self.data.is_cuda)
            sources, targets = numbers.to(self.data.device, non_blocking=True).unbind(1)
            self.data[targets] = self.data[sources]
            self.tokens[targets] = self.tokens[sources]
