"""What every layer is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from quire.distributed.experts import ExpertRanks
from quire.distributed.groups import Ranks
from quire.kernels.base import Ops
from quire.layers.attention.base import AttentionBackend
from quire.loading.model_config import ModelConfig
from quire.platforms.memory import MemoryArena


@dataclass(frozen=True)
class BuildContext:
    """The model's shape, this process's place in it, and the kernels it runs on."""

    config: ModelConfig
    ranks: Ranks
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    attention: AttentionBackend
    max_model_len: int
    experts: ExpertRanks | None = None
    """The ranks that whole experts are spread over; None: each keeps a part of every expert."""
    memory: MemoryArena = field(init=False)
    """Where the weights go."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", MemoryArena(self.device))

    def parameter(self, *shape: int) -> nn.Parameter:
        """Room for a weight; the checkpoint fills it."""
        return nn.Parameter(self.memory.zeros(shape, self.dtype), requires_grad=False)
