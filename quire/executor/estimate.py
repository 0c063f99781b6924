"""Estimates the memory of a model before anything is loaded, from modules on the meta device."""

from __future__ import annotations

import dataclasses

import torch

from quire.config import EngineConfig
from quire.distributed.groups import Ranks
from quire.errors import ConfigError
from quire.executor.base import StepLimits
from quire.layers.moe import has_experts
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.platforms.base import Platform
from quire.vision.loading import make_shape
from quire.worker.building import build_model, build_proposer, encoder_limits
from quire.worker.memory import MemoryNeeds


def estimate_needs(
    config: EngineConfig, files: ModelFiles, model: ModelConfig, platform: Platform, limits: StepLimits
) -> MemoryNeeds:
    """What the model takes on each rank; with pipeline stages, on a rank of the heaviest one. Raises ConfigError if the
    model cannot be split as configured."""
    stages: list[MemoryNeeds] = []
    is_mixture = False
    for stage in range(config.pipeline_parallel_size):
        ranks = Ranks(0, config.tensor_parallel_size, stage, config.pipeline_parallel_size, config.stage_layers)
        shapes = build_model(config, files, model, platform, limits.model_len, ranks, torch.device("meta"))
        proposer = build_proposer(config, files, shapes)
        needs = MemoryNeeds.estimate(shapes, config, model, limits.model_len, limits.rows, limits.tokens, proposer)
        encoder = None if config.vision == "off" else make_shape(shapes.build)
        takes = encoder_limits(config, shapes, encoder)
        stages.append(needs.with_encoder(encoder, takes, ranks.is_first_stage))
        is_mixture = is_mixture or has_experts(shapes)  # type: ignore[arg-type]
    if config.enable_expert_parallel and not is_mixture:  # a single stage may have none
        raise ConfigError(
            f"enable_expert_parallel needs a mixture of experts, and {model.architecture} has none: leave it out",
            "enable_expert_parallel",
            True,
        )
    heaviest = max(stages, key=lambda needs: needs.weight_bytes)
    return dataclasses.replace(heaviest, block_bytes=max(needs.block_bytes for needs in stages))
