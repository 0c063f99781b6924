"""GPUs of other machines, as an engine sees them that plans for them and computes nothing itself."""

from __future__ import annotations

from collections.abc import Set

import torch

LARGE = frozenset({"A100-80G", "H100", "H200", "H20", "GH200", "B200", "B300", "GB200", "GB300"})
"""Cards of 70 GiB and more, by Ray's names."""


class CudaElsewhere:
    """What `CudaPlatform` says of a card, where the card cannot be asked."""

    device = torch.device("cuda")
    # Only the shapes of layers are looked at here, and any machine has these kernels.
    ops = "quire.kernels.reference.TorchOps"
    attention = "torch"
    pipeline_depth = 1
    has_bfloat16 = True

    def __init__(self, cards: Set[str] = frozenset()) -> None:
        large = bool(cards) and cards <= LARGE
        self.max_num_seqs = 1024 if large else 256
        self.max_num_batched_tokens = 16384 if large else 8192

    def describe(self) -> str:
        return "GPUs of a Ray cluster"

    def free_memory(self) -> int:
        return 1 << 62

    def total_memory(self) -> int:
        return 1 << 62
