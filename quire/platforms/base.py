"""What a platform implements."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.errors import QuireError


class PlatformUnavailableError(QuireError):
    """A device cannot be used on this machine; the message says why."""

    def __init__(self, why: str, is_expected: bool = False) -> None:
        """`is_expected`: the device seems to be installed, so the user should learn why it is not used."""
        super().__init__(why)
        self.is_expected = is_expected


class Platform(Protocol):
    """A kind of device: its memory, its kernels, and the default limits that suit it.

    Constructed without arguments; raises `PlatformUnavailableError` if this machine has no such device.
    """

    device: torch.device
    ops: str
    """Dotted path of the kernels."""
    attention: str
    """Attention backend used if none is configured."""
    collectives: str
    """The torch.distributed backend its ranks communicate with."""
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
        """Bytes that can be allocated now."""
        ...

    def total_memory(self) -> int:
        """Bytes the device has."""
        ...
