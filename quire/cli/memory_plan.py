"""What a model would take on this machine, asked of one that has shapes and no weights."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import EngineConfig
from quire.engine.setup import budgets, model_len
from quire.executor.base import StepLimits
from quire.executor.estimate import estimate_needs
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.platforms import choose
from quire.worker.memory import MemoryPlan


@dataclass(frozen=True)
class Outlook:
    """Sizes, as `EngineInfo` would have them."""

    device: str
    dtype: str
    free_bytes: int
    parameters: int
    active_parameters: int
    token_bytes: float
    max_model_len: int
    max_num_seqs: int
    memory: MemoryPlan


def plan_memory(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> Outlook:
    """Ask what would fit. Raises as the engine would where nothing does."""
    platform = choose(config.device)
    longest = model_len(config, model)
    rows, tokens = budgets(config, platform, longest)
    free = platform.free_memory()
    needs = estimate_needs(config, files, model, platform, StepLimits(longest, rows, tokens))
    return Outlook(
        device=platform.describe(),
        dtype=str(needs.dtype).removeprefix("torch."),
        free_bytes=free,
        parameters=needs.parameters,
        active_parameters=needs.active_parameters,
        token_bytes=needs.block_bytes / config.block_size,
        max_model_len=longest,
        max_num_seqs=rows,
        memory=needs.plan(config, platform, free),
    )
