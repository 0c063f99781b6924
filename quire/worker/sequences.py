"""Whole sequences through a model, one at a time and without a scheduler: for evaluation and calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.layers.attention.base import AttentionInputs
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.platforms.base import Platform
from quire.worker.batch import StepInputs
from quire.worker.worker import Worker

LOGIT_ROWS = 128
"""Logits exist for at most this many positions at a time."""


def sequence_inputs(length: int, block_size: int, device: torch.device) -> tuple[torch.Tensor, AttentionInputs]:
    """(positions, the step): one row of `length` new tokens, in blocks 1, 2, 3, …"""
    blocks = -(-length // block_size)
    positions = torch.arange(length, device=device)
    attention = AttentionInputs(
        slots=positions + block_size,
        query_starts=torch.tensor([0, length], dtype=torch.int32, device=device),
        context_lens=torch.tensor([length], dtype=torch.int32, device=device),
        block_tables=torch.arange(1, blocks + 1, dtype=torch.int32, device=device).unsqueeze(0),
        num_rows=1,
        num_tokens=length,
        num_decodes=1 if length == 1 else 0,
        max_query_len=length,
        max_context_len=length,
    )
    return positions, attention


def blocks_for(length: int, block_size: int) -> int:
    """Blocks of a cache that holds one sequence; the first is the null block."""
    return 1 + -(-length // block_size)


class SequenceModel:
    """A model as the engine runs it (its kernels, weights and KV cache), for one sequence at a time."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, model: ModelConfig, platform: Platform, max_len: int
    ) -> None:
        """`max_len`: tokens of the longest sequence."""
        if config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size > 1:
            raise ConfigError("whole sequences run on one device: leave out the parallel sizes")
        eager = dataclasses.replace(config, enforce_eager=True, max_model_len=max_len)
        self._block_size = config.block_size
        self._device = platform.device
        self._worker = Worker(eager, files, model, platform, max_len, max_rows=1, max_tokens=max_len)
        self._worker.make_cache(blocks_for(max_len, config.block_size))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], first: int = 0) -> Iterator[torch.Tensor]:
        """Logits [n, vocab] in float32 of the positions from `first` on, a few rows at a time."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        positions, attention = sequence_inputs(len(tokens), self._block_size, self._device)
        hidden = self._worker.run_sequence(StepInputs(ids, positions, (attention,)))[first:]
        for part in hidden.split(LOGIT_ROWS):
            yield self._worker.model.logits(part).float()

    def close(self) -> None:
        """Free the model."""
        self._worker.shutdown()
