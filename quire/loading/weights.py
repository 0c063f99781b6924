"""The interface between checkpoints and models.

A checkpoint has `Weight`s by name, read on demand. A model has `Target`s by name: which part of the tensor this rank
keeps, and the memory it is copied to. `load.py` matches the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Weight(Protocol):
    """One tensor of a checkpoint. Nothing is read before `read`.

    A weight whose raw bytes are in a file may say where (`stored`, see stored_tensor.py): these are read in parallel.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or the part that `keep` selects (missing dimensions are kept whole)."""
        ...


class Checkpoint(Protocol):
    """A set of tensors, named as in Hugging Face's modelling code."""

    def __iter__(self) -> Iterator[Weight]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor, or a part of it, is copied to."""

    into: torch.Tensor
    """The (view of the) parameter that receives the part."""
    shape: tuple[int, ...]
    """Shape that the whole tensor must have in the checkpoint."""
    keep: tuple[slice, ...] = ()
    """The part this rank keeps; missing dimensions are kept whole."""
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Applied to the part before the copy: a transpose, a regrouping of heads."""
    layouts: tuple[TensorLayout, ...] = ()
    """Other forms that checkpoints store this tensor in; the same for all targets of a name."""


@dataclass(frozen=True)
class TensorLayout:
    """Another form of a tensor in a checkpoint: in several parts, or under another name."""

    names: tuple[str, ...]
    targets: Callable[[], Mapping[str, Sequence[Target]]]
    """Created on demand: with a tensor per expert there are tens of thousands."""

    def under(self, owner: str) -> TensorLayout:
        """The same with the owner's path before each name."""
        names = tuple(f"{owner}.{name}" for name in self.names)
        return TensorLayout(names, lambda: {f"{owner}.{name}": wanted for name, wanted in self.targets().items()})


def match_layouts(targets: Mapping[str, Sequence[Target]], present: Collection[str]) -> dict[str, Sequence[Target]]:
    """The targets by tensor name, in the layouts that a checkpoint with the tensors `present` has."""
    fitted: dict[str, Sequence[Target]] = {}
    for name, wanted in targets.items():
        layouts = wanted[0].layouts if wanted and name not in present else ()
        found = next((layout for layout in layouts if any(each in present for each in layout.names)), None)
        fitted |= {name: wanted} if found is None else found.targets()
    return fitted
