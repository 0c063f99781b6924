"""The meeting point of checkpoints and models.

A checkpoint offers `Weight`s by name, read on demand. A model offers `Target`s by name: which part of that tensor
this rank keeps, and where it lands. `load.py` joins the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Weight(Protocol):
    """One tensor of a checkpoint. Nothing is read before `read`.

    One whose bytes lie plain in a file may say where (`stored`, see stored.py): such tensors are read in parallel.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or the part of it that `keep` selects (missing dimensions are kept whole)."""
        ...


class Checkpoint(Protocol):
    """A set of named tensors, in the names Hugging Face's modelling code uses."""

    def __iter__(self) -> Iterator[Weight]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor, or a part of it, goes."""

    into: torch.Tensor
    """The (view of the) parameter that receives the part."""
    shape: tuple[int, ...]
    """The whole tensor's shape, as the checkpoint must have it."""
    keep: tuple[slice, ...] = ()
    """The part this rank keeps; missing dimensions are kept whole."""
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Applied to the part before it is copied: a transpose, a regrouping of heads."""
    layouts: tuple[TensorLayout, ...] = ()
    """Other ways checkpoints hold this tensor; all targets of a name have the same."""


@dataclass(frozen=True)
class TensorLayout:
    """A tensor held otherwise: in several pieces, or under another name."""

    names: tuple[str, ...]
    targets: Callable[[], Mapping[str, Sequence[Target]]]
    """Made when they are wanted: of experts held one by one there are tens of thousands."""

    def under(self, owner: str) -> TensorLayout:
        """The same, with names that begin with their owner's path."""
        names = tuple(f"{owner}.{name}" for name in self.names)
        return TensorLayout(names, lambda: {f"{owner}.{name}": wanted for name, wanted in self.targets().items()})


def fitting(targets: Mapping[str, Sequence[Target]], present: Collection[str]) -> dict[str, Sequence[Target]]:
    """The targets by the names that a checkpoint with the tensors `present` has for them."""
    fitted: dict[str, Sequence[Target]] = {}
    for name, wanted in targets.items():
        layouts = wanted[0].layouts if wanted and name not in present else ()
        found = next((layout for layout in layouts if any(each in present for each in layout.names)), None)
        fitted |= {name: wanted} if found is None else found.targets()
    return fitted
