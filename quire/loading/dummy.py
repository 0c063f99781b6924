"""Random weights of realistic scale, for benchmarks and tests without a download."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.loading.weights import AnyTarget, Assembly, AssemblyPart

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


@dataclass(frozen=True)
class DummyCodes:
    """A tensor of a weight in few bits, generated when read: random codes of the full range, or scales."""

    name: str
    part: AssemblyPart
    seed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or the part that `keep` selects."""
        device, dtype, sample = self.part.assembly.device, self.part.dtypes[0], self.part.sample
        if self.part.exact is not None:
            return self.part.exact()[keep]
        generator = _generator(self.name, self.seed, device)
        if sample is None and not dtype.is_floating_point:
            bounds = torch.iinfo(dtype)
            drawn = torch.randint(
                bounds.min, bounds.max + 1, self.shape, dtype=dtype, device=device, generator=generator
            )
        elif sample is None and dtype.itemsize == 1:
            # Any byte but those that mean NaN.
            drawn = torch.randint(0, 254, self.shape, dtype=torch.uint8, device=device, generator=generator)
            drawn = torch.where(drawn < 127, drawn, drawn + 1).view(dtype)
        elif sample is None:
            drawn = torch.empty(self.shape, device=device).normal_(0.0, _SCALE, generator=generator).to(dtype)
        else:
            spread = torch.rand(self.shape, device=device, generator=generator) if self.shape else torch.tensor(0.5)
            drawn = (sample * (0.75 + 0.5 * spread.to(device))).to(dtype)
        return drawn[keep]


class DummyCheckpoint:
    """A checkpoint with exactly the tensors that a model needs."""

    def __init__(self, targets: Mapping[str, Sequence[AnyTarget]], seed: int = 0) -> None:
        apart = (_apart(own, wanted) for own, wanted in targets.items())
        found = {name: each[0] for part in apart for name, each in part.items() if each}
        optional = {name for name, each in found.items() if isinstance(each, AssemblyPart) and each.optional}
        self._weights = [_dummy(name, each, seed) for name, each in found.items() if name not in optional]

    def __iter__(self) -> Iterator[DummyWeight | DummyCodes]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _apart(name: str, wanted: Sequence[AnyTarget]) -> Mapping[str, Sequence[AnyTarget]]:
    """Tensors that several assemblies read parts of, in the layout that has one for each: every read generates all of
    a tensor."""
    if len(wanted) > 1 and isinstance(wanted[0], AssemblyPart) and wanted[0].layouts:
        return wanted[0].layouts[0].targets()
    return {name: wanted}


def _dummy(name: str, target: AnyTarget, seed: int) -> DummyWeight | DummyCodes:
    if isinstance(target, AssemblyPart):
        return DummyCodes(name, target, seed)
    if target.into.dtype.itemsize == 1:
        part = AssemblyPart(Assembly(lambda read: None, target.into.device, 0), "", target.shape, (target.into.dtype,))
        return DummyCodes(name, part, seed)
    return DummyWeight(name, tuple(target.shape), seed, target.into.device)


def _generator(name: str, seed: int, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def _fill(name: str, tensor: torch.Tensor, seed: int) -> None:
    if tensor.dim() == 1 and name.endswith("weight"):
        tensor.fill_(1.0)  # Vectors named weight belong to norms.
        return
    generator = _generator(name, seed, tensor.device)
    if tensor.numel() <= _BANK or tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor.normal_(0.0, _SCALE, generator=generator)
        return
    bank = torch.empty(_BANK, dtype=tensor.dtype).normal_(0.0, _SCALE, generator=generator)
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), _BANK):
        part = flat[start : start + _BANK]
        part.copy_(bank[: part.numel()])
