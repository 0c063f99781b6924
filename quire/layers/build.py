"""What every layer is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quire.distributed.groups import Ranks
from quire.kernels.base import Ops
from quire.layers.attention.base import AttentionBackend
from quire.loading.model_config import ModelConfig


@dataclass(frozen=True)
class Build:
    """The model's shape, this process's place in it, and the kernels it runs on."""

    config: ModelConfig
    ranks: Ranks
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    attention: AttentionBackend
    max_model_len: int

    def parameter(self, *shape: int) -> nn.Parameter:
        """Room for a weight; the checkpoint fills it."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)
