"""Static description of a started engine. Imports no torch: the front uses it for engines in other processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.messages.media import EncoderLimits

if TYPE_CHECKING:
    from quire.worker.memory import MemoryPlan


@dataclass(frozen=True)
class EngineInfo:
    """The engine's sizes and limits, as resolved at start."""

    files: ModelFiles
    model: ModelConfig
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    """Usable blocks, without the reserved one."""
    cache_tokens: int
    """Tokens of one request that fit in the cache."""
    weight_bytes: int
    kv_bytes: int
    start_seconds: float
    keys: ContentKeys
    encoder: EncoderLimits = field(default_factory=EncoderLimits)
    """What requests may have beside token ids."""
    memory: MemoryPlan | None = None
    """Where the memory of the (first) device went; None for an engine in another process."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.kv_bytes // (self.num_blocks + 1)
