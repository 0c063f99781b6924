"""The target model over whole sequences: features of its layers, its likeliest next tokens, its embeddings and head."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError, UnsupportedModelError
from quire.layers.attention.base import AttentionInputs, FeatureRequest
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.models.registry import model_class
from quire.platforms.base import Platform
from quire.speculative.eagle3 import target_embedding
from quire.training.store import TOP_TOKENS, TargetRows, TokenSequence
from quire.worker.batch import StepInputs, as_siblings
from quire.worker.geometry import CacheGeometry
from quire.worker.worker import Worker

MAX_TOKENS = {"cuda": 16384, "cpu": 2048}
"""Tokens of a step, by the kind of device."""
LOGIT_ROWS = {"cuda": 2048, "cpu": 128}
"""Logits exist for at most this many positions at a time."""


def packed_inputs(
    lengths: Sequence[int], geometry: CacheGeometry, device: torch.device
) -> tuple[torch.Tensor, tuple[AttentionInputs, ...]]:
    """(positions, the step as each cache group sees it): a row for each of these lengths, all from position 0, in
    pages 1, 2, 3, ..., one row's after another's and one group's after another's."""
    size, widest = geometry.block_size, -(-max(lengths) // geometry.block_size)
    counts = torch.tensor(lengths)
    ends = counts.cumsum(0)
    total = int(ends[-1])
    owners = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    positions = torch.arange(total) - (ends - counts)[owners]
    step = AttentionInputs(
        slots=torch.empty(0),
        query_starts=torch.nn.functional.pad(ends, (1, 0)).to(device, torch.int32),
        context_lens=counts.to(device, torch.int32),
        block_tables=torch.empty(0),
        num_rows=len(lengths),
        num_tokens=total,
        num_decodes=0,
        max_query_len=max(lengths),
        max_context_len=max(lengths),
    )
    groups, first = [], 1
    for group in geometry.groups:
        pages = group.pages or widest
        tables = first + torch.arange(len(lengths) * pages, dtype=torch.int32).view(len(lengths), pages)
        columns = torch.zeros_like(positions) if group.pages else positions // size
        slots = tables[owners, columns].long() * size + positions % size
        groups.append(
            dataclasses.replace(step, slots=slots.to(device), block_tables=tables.to(device), plans={}, common={})
        )
        first += tables.numel()
    return positions.to(device), as_siblings(groups)


class TargetModel:
    """A model as the engine runs it, over packed sequences that begin at position 0."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        model: ModelConfig,
        platform: Platform,
        max_len: int,
        layers: Sequence[int],
        max_tokens: int | None = None,
    ) -> None:
        """`max_len`: tokens of the longest sequence. `layers`: those whose input is a feature."""
        if config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size > 1:
            raise ConfigError("training reads the target on one device: leave out the parallel sizes")
        self.device = platform.device
        self._max_tokens = max(max_len, max_tokens or MAX_TOKENS[self.device.type])
        self._logit_rows = LOGIT_ROWS[self.device.type]
        if not getattr(model_class(model.architecture, config.model_impl), "supports_features", False):
            raise UnsupportedModelError(
                f"{model.architecture} runs through transformers, where the hidden states that a head reads are not to "
                "be had"
            )
        eager = dataclasses.replace(config, enforce_eager=True, max_model_len=max_len)
        rows = max(8, self._max_tokens // 64)
        self._worker = Worker(eager, files, model, platform, max_len, max_rows=rows, max_tokens=self._max_tokens)
        geometry = self._worker.geometry
        if any(group.kind == "state" for group in geometry.groups):
            rows = max(1, self._max_tokens // max_len)  # states are large: as many rows as whole sequences fit
        self._max_rows = rows
        blocks = -(-max_len // geometry.block_size)
        # Tables are as wide as a step's longest row: some of their pages are not used.
        self._pages = max(blocks, 2 * -(-self._max_tokens // geometry.block_size))
        pages = sum(rows * group.pages if group.pages else self._pages for group in geometry.groups)
        self._worker.make_cache(pages + 1)
        self._layers = tuple(layers)
        self._hidden_size = model.hidden_size
        self._vocab_size = model.vocab_size

    def batches(self, sequences: Sequence[TokenSequence]) -> Iterator[list[TokenSequence]]:
        """The sequences in order, as many at a time as a step takes."""
        size = self._worker.geometry.block_size
        batch: list[TokenSequence] = []
        total = widest = 0
        for sequence in sequences:
            widest_then = max(widest, -(-len(sequence) // size))
            is_full = (
                total + len(sequence) > self._max_tokens
                or len(batch) == self._max_rows
                or (len(batch) + 1) * widest_then > self._pages
            )
            if batch and is_full:
                yield batch
                batch, total, widest_then = [], 0, -(-len(sequence) // size)
            batch.append(sequence)
            total, widest = total + len(sequence), widest_then
        if batch:
            yield batch

    @torch.inference_mode()
    def read(self, sequences: Sequence[TokenSequence]) -> TargetRows:
        """Run one step over the sequences; what it computed, on the host."""
        lengths = [len(each) for each in sequences]
        tokens = torch.cat([torch.from_numpy(each.tokens).long() for each in sequences]).to(self.device)
        positions, groups = packed_inputs(lengths, self._worker.geometry, self.device)
        groups[0].features = request = FeatureRequest(self._layers)
        hidden = self._worker.run_sequence(StepInputs(tokens, positions, groups))
        assert request.joined is not None
        features = request.joined.to(torch.bfloat16)
        # The logits of token i predict token i + 1.
        learned = torch.cat([torch.from_numpy(each.learned).roll(-1) & _but_last(len(each)) for each in sequences])
        chosen = learned.nonzero().squeeze(-1).to(self.device)
        ids = torch.zeros(len(tokens), TOP_TOKENS, dtype=torch.int32, device=self.device)
        probabilities = torch.zeros(len(tokens), TOP_TOKENS, dtype=torch.float16, device=self.device)
        kept = min(TOP_TOKENS, self._vocab_size)
        for some in chosen.split(self._logit_rows):
            logits = self._worker.model.logits(hidden[some]).float()
            best = logits.topk(kept, -1)
            ids[some, :kept] = best.indices.int()
            probabilities[some, :kept] = (best.values - logits.logsumexp(-1, keepdim=True)).exp().half()
        return TargetRows(features.cpu(), ids.cpu(), probabilities.cpu())

    @torch.inference_mode()
    def embeddings(self) -> torch.Tensor:
        """[vocabulary, hidden]: the target's vector of each token, as the head reads it."""
        embedding = target_embedding(self._worker.model)
        tokens = torch.arange(self._vocab_size, device=self.device)
        return torch.cat([embedding(some) for some in tokens.split(4096)]).clone()

    @torch.inference_mode()
    def head_rows(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """[tokens, hidden]: these rows of the target's LM head, if its logits are linear in the hidden states."""
        size, dtype = self._hidden_size, self._worker.model.build.dtype
        unit = torch.eye(size, dtype=dtype, device=self.device)
        columns = []
        for some in unit.split(self._logit_rows):
            logits = self._worker.model.logits(some)[:, tokens].float()
            twice = self._worker.model.logits(2 * some)[:, tokens].float()
            if not torch.allclose(twice, 2 * logits, rtol=0.02, atol=1e-3 * float(logits.abs().max())):
                return None  # a soft cap
            columns.append(logits)
        return torch.cat(columns).t().contiguous()

    def close(self) -> None:
        """Free the model."""
        self._worker.shutdown()


def _but_last(length: int) -> torch.Tensor:
    return torch.arange(length) < length - 1
