"""What an engine turned out to be. Without torch, so that a process without an engine can know it of another's."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig


@dataclass(frozen=True)
class EngineInfo:
    """What the engine turned out to be, once everything was resolved."""

    files: ModelFiles
    model: ModelConfig
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    """Usable blocks; the reserved one is not counted."""
    weight_bytes: int
    kv_bytes: int
    start_seconds: float
    keys: ContentKeys

    @property
    def block_bytes(self) -> int:
        """What a block takes."""
        return self.kv_bytes // (self.num_blocks + 1)

    @property
    def cache_tokens(self) -> int:
        """Tokens the KV cache holds."""
        return self.num_blocks * self.block_size
