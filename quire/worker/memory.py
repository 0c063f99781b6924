"""Where the bytes go: weights, working memory, and what is left for the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quire.config import EngineConfig
from quire.errors import CacheTooSmallError
from quire.loading.model_config import ModelConfig
from quire.models.base import CausalLM
from quire.platforms.base import Platform
from quire.worker.kv import block_bytes

LOGIT_COPIES = 4
"""Logits, scaled logits, probabilities and their sums may exist at once."""
RESERVE = 2**30
"""On a GPU, left for the libraries' own workspaces."""


@dataclass(frozen=True)
class MemoryNeeds:
    """What a rank's model takes, and what a block of its cache takes."""

    dtype: torch.dtype
    parameters: int
    weight_bytes: int
    block_bytes: int
    activation_bytes: int
    most_blocks: int
    """Every row at full length: more could never be used."""

    @classmethod
    def of(
        cls, model: CausalLM, config: EngineConfig, shape: ModelConfig, max_model_len: int, max_rows: int
    ) -> MemoryNeeds:
        """Measured on the model itself, which may be on the meta device."""
        weights = list(model.parameters())  # type: ignore[attr-defined]
        dtype = weights[0].dtype
        tokens = max(config.max_num_batched_tokens or 0, 8192)
        widest = 4 * max(shape.intermediate_size, shape.hidden_size) * tokens * dtype.itemsize
        return cls(
            dtype=dtype,
            parameters=sum(weight.numel() for weight in weights),
            weight_bytes=sum(weight.numel() * weight.itemsize for weight in weights),
            block_bytes=block_bytes(model.kv_shape, config.block_size, dtype),
            activation_bytes=widest + LOGIT_COPIES * 4 * shape.vocab_size * min(512, max_rows),
            most_blocks=max_rows * math.ceil(max_model_len / config.block_size) + 1,
        )

    def fitting_blocks(self, config: EngineConfig, platform: Platform, free: int) -> int:
        """How many KV blocks `free` bytes allow, the reserved one included."""
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override + 1
        budget = config.kv_cache_memory_bytes or self._budget(config, platform, free)
        blocks = budget // self.block_bytes
        if blocks < 2:
            raise CacheTooSmallError(
                f"{budget} bytes for the KV cache do not hold one block of {config.block_size} tokens "
                f"({self.block_bytes} bytes; two are needed, one is reserved). Raise kv_cache_memory_bytes or the "
                "memory share, or lower block_size"
            )
        return min(blocks, self.most_blocks)

    def _budget(self, config: EngineConfig, platform: Platform, free: int) -> int:
        if platform.device.type == "cpu":
            return config.cpu_kv_cache_bytes or int(free * config.cpu_kv_cache_share)
        kept_free = platform.total_memory() * (1 - config.gpu_memory_utilization)
        return max(0, int(free - kept_free - self.activation_bytes - RESERVE))
