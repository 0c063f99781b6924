"""Attention backends that rank processes import by dotted path."""

from __future__ import annotations

import torch
from torch import distributed

from quire.layers.attention.base import AttentionInputs, AttentionSpec
from quire.layers.attention.cpu import CpuPagedAttention


class FailsInTheFirstStage(CpuPagedAttention):
    """Raises at the fourth step with prompts, on the first rank."""

    prompts = 0

    def attend(self, q: torch.Tensor, kv: torch.Tensor, inputs: AttentionInputs, spec: AttentionSpec) -> torch.Tensor:
        self.prompts += inputs.max_query_len > 1
        if self.prompts == 4 and distributed.is_initialized() and distributed.get_rank() == 0:
            self.prompts += 1
            raise RuntimeError("a stage that fails")
        return super().attend(q, kv, inputs, spec)
