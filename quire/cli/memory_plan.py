"""What a model would take on this machine, asked of a worker that has shapes and no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.config import EngineConfig
from quire.distributed.groups import Ranks
from quire.engine.setup import longest_position
from quire.kernels.reference import TorchOps
from quire.layers.attention.torch_paged import TorchPagedAttention
from quire.layers.build import Build
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.models.registry import model_class
from quire.platforms import choose
from quire.platforms.base import Platform
from quire.worker.dtypes import choose_dtype
from quire.worker.worker import Worker


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes, as `EngineFacts` would have them."""

    device: str
    dtype: str
    free_bytes: int
    parameters: int
    weight_bytes: int
    token_bytes: float
    num_blocks: int
    """Usable ones; one more is reserved."""
    cache_bytes: int
    cache_tokens: int
    max_model_len: int
    max_num_seqs: int


def plan_memory(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> MemoryPlan:
    """Ask what would fit. Raises as the engine would where nothing does."""
    platform = choose(config.device)
    longest = longest_position(model)
    if isinstance(config.max_model_len, int) and config.max_model_len > 0:
        longest = min(longest, config.max_model_len)
    rows = config.max_num_seqs or platform.max_num_seqs
    worker = _UnloadedWorker(config, files, model, platform, longest, rows)
    blocks = worker.fitting_blocks()
    return MemoryPlan(
        device=platform.describe(),
        dtype=str(worker.dtype).removeprefix("torch."),
        free_bytes=platform.free_memory(),
        parameters=sum(p.numel() for p in worker.model.parameters()),  # type: ignore[attr-defined]
        weight_bytes=worker.weight_bytes,
        token_bytes=worker.block_bytes / config.block_size,
        num_blocks=blocks - 1,
        cache_bytes=blocks * worker.block_bytes,
        cache_tokens=(blocks - 1) * config.block_size,
        max_model_len=longest,
        max_num_seqs=rows,
    )


class _UnloadedWorker(Worker):
    """The real worker's arithmetic over a model on the meta device."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        model_config: ModelConfig,
        platform: Platform,
        max_model_len: int,
        max_rows: int,
    ) -> None:
        self._config = config
        self._model_config = model_config
        self._max_model_len = max_model_len
        self._max_rows = max_rows
        self.dtype = choose_dtype(config.dtype, model_config, files, platform)
        build = Build(
            config=model_config,
            ranks=Ranks(),
            dtype=self.dtype,
            device=torch.device("meta"),
            ops=TorchOps(),
            attention=TorchPagedAttention(),
            max_model_len=max_model_len,
        )
        self.model = model_class(model_config.architecture)(build)  # type: ignore[call-arg]
        self._platform = _AfterLoading(platform, self.weight_bytes)


class _AfterLoading:
    """A platform whose free memory no longer has the weights' share."""

    def __init__(self, platform: Platform, weight_bytes: int) -> None:
        self._platform = platform
        self._weight_bytes = weight_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def free_memory(self) -> int:
        return max(0, self._platform.free_memory() - self._weight_bytes)
