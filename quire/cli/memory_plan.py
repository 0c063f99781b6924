"""What a model would take on this machine, asked of one that has shapes and no weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.config import EngineConfig
from quire.engine.setup import budgets, model_len
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.platforms import choose
from quire.worker.memory import MemoryNeeds
from quire.worker.worker import build_model


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
    longest = model_len(config, model)
    rows, _ = budgets(config, platform, longest)
    shapes = build_model(config, files, model, platform, longest, device=torch.device("meta"))
    needs = MemoryNeeds.of(shapes, config, model, longest, rows)
    blocks = needs.fitting_blocks(config, platform, max(0, platform.free_memory() - needs.weight_bytes))
    return MemoryPlan(
        device=platform.describe(),
        dtype=str(needs.dtype).removeprefix("torch."),
        free_bytes=platform.free_memory(),
        parameters=needs.parameters,
        weight_bytes=needs.weight_bytes,
        token_bytes=needs.block_bytes / config.block_size,
        num_blocks=blocks - 1,
        cache_bytes=blocks * needs.block_bytes,
        cache_tokens=(blocks - 1) * config.block_size,
        max_model_len=longest,
        max_num_seqs=rows,
    )
