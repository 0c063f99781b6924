"""A device batch without a model: rows with chosen parameters and tokens, ready for a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.kv import KVFormat
from quire.layers.attention.base import KVSpec
from quire.messages.plan import NewRow, StepPlan
from quire.messages.sampling import SamplingParams
from quire.worker.batch import DeviceBatch
from quire.worker.kv import KVCache
from quire.worker.logits import LogitsProcessor
from quire.worker.sampler import Sampler

BLOCK = 4
ROW_TOKENS = 32


class Device:
    """Rows are added with their tokens; given logits, tokens are drawn."""

    def __init__(self, vocab: int, max_rows: int = 8, processors: Sequence[LogitsProcessor] = ()) -> None:
        self.max_rows = max_rows
        blocks_per_row = ROW_TOKENS // BLOCK
        self._kv = KVCache(
            KVSpec(1, 1, 2), 1 + max_rows * blocks_per_row, BLOCK, KVFormat(torch.float32), torch.device("cpu")
        )
        self._kv.tokens.fill_(2**31 - 1)  # garbage past a row's tokens must not matter
        self.batch = DeviceBatch(max_rows, ROW_TOKENS, vocab, self._kv, torch.device("cpu"))
        self.sampler = Sampler(self.batch, processors)
        self._steps = 0

    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int] = (0,), output: Sequence[int] = (), *,
        seed: int = 0, sequence: int = 0, stop_ids: Sequence[int] = (), bad_words: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        """A row that has `prompt` and has drawn `output`."""
        tokens = [*prompt, *output]
        new = NewRow(
            row=row, request=str(row), prompt_len=len(prompt), num_tokens=len(tokens), num_computed=0, limit=ROW_TOKENS,
            seed=params.seed if params.seed is not None else seed, sequence=sequence, params=params,
            stop_ids=list(stop_ids), bad_words=[list(word) for word in bad_words],
        )  # fmt: skip
        count = ROW_TOKENS // BLOCK
        blocks = np.arange(1 + row * count, 1 + (row + 1) * count, dtype=np.int32)
        none = np.empty(0, np.int32)
        self.batch.apply(
            StepPlan(
                step=self._steps, rows=none, counts=none, num_decodes=0, tokens=none, samples=none, sample_rows=none,
                block_rows=np.full(count, row, np.int32), block_indices=np.arange(count, dtype=np.int32), blocks=blocks,
                max_context=len(tokens), add=[new],
            )
        )  # fmt: skip
        self._steps += 1
        self._kv.tokens.view(-1)[int(blocks[0]) * BLOCK :][: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)

    def draw(self, logits: torch.Tensor, rows: Sequence[int]) -> tuple[list[int], list[bool]]:
        """A token for each of the rows, and which rows had no valid logits."""
        host = np.array(rows, np.int32)
        device = torch.tensor(list(rows))
        longest = int(self.batch.num_tokens[device].max())
        logits = logits.clone()
        self.sampler.adjust(logits, device, self.batch.num_tokens[device], host, longest)
        draws = self.sampler.draw(logits, device, self.batch.num_tokens[device], host)
        return draws.tokens.tolist(), draws.invalid.tolist()


class Operations(TorchDispatchMode):
    """Counts torch operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
