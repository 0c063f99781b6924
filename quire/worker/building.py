"""From a configuration to a model without weights: which kernels, which attention, which dtype."""

from __future__ import annotations

from typing import Any

import torch

from quire.config import EngineConfig
from quire.distributed.experts import ExpertRanks
from quire.distributed.groups import Ranks
from quire.errors import ConfigError
from quire.kernels.base import Ops
from quire.layers.attention.base import AttentionBackend
from quire.layers.attention.registry import attention_backend
from quire.layers.build_context import BuildContext
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.models.base import CausalLM
from quire.models.registry import model_class
from quire.platforms.base import Platform
from quire.registry import resolve
from quire.worker.dtypes import choose_dtype


def make_ops(config: EngineConfig, platform: Platform) -> Ops:
    """The platform's kernels."""
    kind = resolve("kernels", platform.ops, {})
    ops: Ops = kind(batch_invariant=True) if config.batch_invariant else kind()
    return ops


def _make_attention(config: EngineConfig, platform: Platform) -> AttentionBackend:
    kind: Any = attention_backend(backend_name(config, platform))
    return kind(batch_invariant=True) if config.batch_invariant else kind()


def _check_block_size(config: EngineConfig, platform: Platform) -> None:
    if backend_name(config, platform) == "triton" and config.block_size & (config.block_size - 1):
        raise ConfigError(
            f"block_size must be a power of two for the attention backend 'triton', got {config.block_size}",
            "block_size",
            config.block_size,
        )


def _check_invariance(config: EngineConfig, platform: Platform, dtype: torch.dtype) -> None:
    able = platform.ops.endswith("TritonOps") and backend_name(config, platform) == "triton"
    if config.batch_invariant and not (able and dtype.itemsize == 2):
        raise ConfigError(
            "batch_invariant needs a GPU with quire's own kernels, and bfloat16 or float16 "
            f"(here: {platform.describe()}, {str(dtype).removeprefix('torch.')})",
            "batch_invariant",
            True,
        )


def backend_name(config: EngineConfig, platform: Platform) -> str:
    """The attention backend asked for, or the platform's own."""
    return platform.attention if config.attention_backend == "auto" else config.attention_backend


def build_model(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    platform: Platform,
    max_model_len: int,
    ranks: Ranks = Ranks(),
    device: torch.device | None = None,
    replica: int = 0,
) -> CausalLM:
    """The model's layers, their weights not filled. `device` other than the platform's: "meta" for shapes alone.

    `replica`: which of those that share the experts this is.
    """
    dtype = choose_dtype(config.dtype, model, files, platform)
    _check_invariance(config, platform, dtype)
    _check_block_size(config, platform)
    build = BuildContext(
        config=model,
        ranks=ranks,
        dtype=dtype,
        device=device or platform.device,
        ops=make_ops(config, platform),
        attention=_make_attention(config, platform),
        max_model_len=max_model_len,
        experts=_expert_ranks(config, ranks, replica),
    )
    built: CausalLM = model_class(model.architecture)(build)  # type: ignore[call-arg]
    return built


def _expert_ranks(config: EngineConfig, ranks: Ranks, replica: int) -> ExpertRanks | None:
    """The ranks that whole experts are spread over, where they are."""
    if not config.enable_expert_parallel:
        return None
    spare = config.num_redundant_experts
    if config.steps_together:
        return ExpertRanks(replica, config.data_parallel_size, spare, exchanges=True)
    return ExpertRanks(ranks.tp_rank, ranks.tp_size, spare, first=ranks.pp_rank * ranks.tp_size)
