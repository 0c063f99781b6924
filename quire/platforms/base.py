"""What the engine asks of a platform."""

from __future__ import annotations

from typing import Protocol

import torch


class Platform(Protocol):
    """A kind of device: its memory, its kernels, and the limits that suit it."""

    device: torch.device
    ops: str
    """Dotted path of the kernels."""
    attention: str
    """Attention backend used when none is named."""
    pipeline_depth: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def has_bfloat16(self) -> bool:
        """Whether bfloat16 products run in hardware."""
        ...

    def describe(self) -> str:
        """The device in a few words."""
        ...

    def free_memory(self) -> int:
        """Bytes a new allocation could take now."""
        ...

    def total_memory(self) -> int:
        """Bytes the device has."""
        ...
