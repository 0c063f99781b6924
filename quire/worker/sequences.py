"""Whole sequences through a model, one at a time and without a scheduler: for evaluation and calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.layers.attention.base import AttentionInputs
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.platforms.base import Platform
from quire.worker.batch import StepInputs, as_siblings
from quire.worker.geometry import CacheGeometry
from quire.worker.worker import Worker

LOGIT_ROWS = 128
"""Logits exist for at most this many positions at a time."""


def sequence_inputs(
    length: int, geometry: CacheGeometry, device: torch.device
) -> tuple[torch.Tensor, tuple[AttentionInputs, ...]]:
    """(positions, the step as each cache group sees it): one row of `length` new tokens, in blocks 1, 2, 3, …, one
    group's after another's."""
    size, blocks = geometry.block_size, -(-length // geometry.block_size)
    positions = torch.arange(length, device=device)
    step = AttentionInputs(
        slots=positions + size,
        query_starts=torch.tensor([0, length], dtype=torch.int32, device=device),
        context_lens=torch.tensor([length], dtype=torch.int32, device=device),
        block_tables=torch.empty(0),
        num_rows=1,
        num_tokens=length,
        num_decodes=1 if length == 1 else 0,
        max_query_len=length,
        max_context_len=length,
    )
    groups, first = [], 1
    for group in geometry.groups:
        pages = torch.arange(first, first + (group.pages or blocks), dtype=torch.int32, device=device)
        groups.append(replace(step, slots=positions + first * size, block_tables=pages.unsqueeze(0), plans={}))
        first += len(pages)
    return positions, as_siblings(groups)


def blocks_for(length: int, geometry: CacheGeometry) -> int:
    """Blocks of a cache that holds one sequence; the first is the null block."""
    return geometry.most_pages(length) + 1


class SequenceModel:
    """A model as the engine runs it (its kernels, weights and KV cache), for one sequence at a time."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, model: ModelConfig, platform: Platform, max_len: int
    ) -> None:
        """`max_len`: tokens of the longest sequence."""
        if config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size > 1:
            raise ConfigError("whole sequences run on one device: leave out the parallel sizes")
        eager = dataclasses.replace(config, enforce_eager=True, max_model_len=max_len)
        self._device = platform.device
        self._worker = Worker(eager, files, model, platform, max_len, max_rows=1, max_tokens=max_len)
        self._worker.make_cache(blocks_for(max_len, self._worker.geometry))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], first: int = 0) -> Iterator[torch.Tensor]:
        """Logits [n, vocab] in float32 of the positions from `first` on, a few rows at a time."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        positions, groups = sequence_inputs(len(tokens), self._worker.geometry, self._device)
        hidden = self._worker.run_sequence(StepInputs(ids, positions, groups))[first:]
        for part in hidden.split(LOGIT_ROWS):
            yield self._worker.model.logits(part).float()

    def close(self) -> None:
        """Free the model."""
        self._worker.shutdown()
