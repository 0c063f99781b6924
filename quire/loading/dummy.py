"""Random weights of realistic scale, for benchmarks and tests without a download."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.loading.weights import Target

_CPU = torch.device("cpu")
_SCALE = 0.02
# Drawing normals costs ten times a copy, so larger tensors repeat a bank of values. An odd length makes rows differ.
_BANK = (1 << 22) - 3


@dataclass(frozen=True)
class DummyWeight:
    """A tensor generated when read. The same name, shape, seed and device type always give the same values."""

    name: str
    shape: tuple[int, ...]
    seed: int = 0
    device: torch.device = _CPU
    """Device that generates it: billions of normals take seconds on a GPU and minutes on a CPU."""

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or the part that `keep` selects: parts of different ranks are of the same whole tensor."""
        tensor = torch.empty(self.shape, device=self.device)
        _fill(self.name, tensor, self.seed)
        return tensor[keep]


class DummyCheckpoint:
    """A checkpoint with exactly the tensors that a model needs."""

    def __init__(self, targets: Mapping[str, Sequence[Target]], seed: int = 0) -> None:
        self._weights = [
            DummyWeight(name, tuple(each[0].shape), seed, each[0].into.device) for name, each in targets.items() if each
        ]

    def __iter__(self) -> Iterator[DummyWeight]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _fill(name: str, tensor: torch.Tensor, seed: int) -> None:
    if tensor.dim() == 1 and name.endswith("weight"):
        tensor.fill_(1.0)  # Vectors named weight belong to norms.
        return
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest, "little") >> 1)
    if tensor.numel() <= _BANK or tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor.normal_(0.0, _SCALE, generator=generator)
        return
    bank = torch.empty(_BANK, dtype=tensor.dtype).normal_(0.0, _SCALE, generator=generator)
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), _BANK):
        part = flat[start : start + _BANK]
        part.copy_(bank[: part.numel()])
