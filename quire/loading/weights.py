"""The interface between checkpoints and models.

A checkpoint has `StoredWeight`s by name, read on demand. A model has `Target`s by name: which part of the tensor this
rank keeps, and the memory it is copied to; or, where several tensors fill a weight together, `AssemblyPart`s.
`load.py` matches the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch


class StoredWeight(Protocol):
    """One tensor of a checkpoint. Nothing is read before `read`.

    A weight whose raw bytes are in a file may say where (`stored`, see stored_tensor.py): these are read in parallel.
    One that knows its `dtype` before it is read should say so. `forms_for` gives the tensor in the form that a model's
    targets need, where there are several (GGUF).
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

    def __iter__(self) -> Iterator[StoredWeight]: ...

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
    part_of: Assembly | None = None
    """The assembly that fills the rest of the same weight."""
    also: tuple[Target, ...] = ()
    """The same for checkpoints that have the tensor in another shape, under the same name."""

    def for_shape(self, shape: Sequence[int]) -> Target:
        """The target of a stored tensor of this shape; this one, if none has it."""
        return next((each for each in (self, *self.also) if tuple(each.shape) == tuple(shape)), self)


@dataclass(frozen=True, eq=False)
class Assembly:
    """A weight, or some of its outputs, that several tensors of a checkpoint fill together."""

    place: Callable[[Mapping[str, torch.Tensor]], None]
    """Fills it from the parts that were read, by their keys. They may be on the host or on `device`."""
    device: torch.device
    nbytes: int
    """Bytes it fills."""
    format: str = ""
    """How the checkpoint has it, in words."""
    layout: str = ""
    """Name of the layout it is held in."""


@dataclass(frozen=True)
class AssemblyPart:
    """One of the tensors of an assembly."""

    assembly: Assembly
    key: str
    """Its name within the assembly: what follows the module's name in the checkpoint."""
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    """The dtypes it may have in the checkpoint."""
    keep: tuple[slice, ...] = ()
    optional: bool = False
    sample: float | None = None
    """For random weights: None: codes of the full range; a number: values around it."""
    also: tuple[tuple[tuple[int, ...], tuple[slice, ...]], ...] = ()
    """Other shapes that checkpoints store it in, each with what is kept of it."""
    exact: Callable[[], torch.Tensor] | None = None
    """For random weights: makes the tensor, where its values are not free."""
    layouts: tuple[TensorLayout, ...] = ()

    def keep_of(self, shape: Sequence[int]) -> tuple[slice, ...] | None:
        """What is kept of a stored tensor of this shape; None: it must not have this shape."""
        known = ((self.shape, self.keep), *self.also)
        return next((keep for expected, keep in known if tuple(shape) == tuple(expected)), None)


AnyTarget: TypeAlias = "Target | AssemblyPart"


@dataclass(frozen=True)
class TensorLayout:
    """Another form of a tensor in a checkpoint: in several parts, or under another name."""

    names: tuple[str, ...]
    targets: Callable[[], Mapping[str, Sequence[AnyTarget]]]
    """Created on demand: with a tensor per expert there are tens of thousands."""

    def under(self, owner: str) -> TensorLayout:
        """The same with the owner's path before each name."""
        names = tuple(f"{owner}.{name}" for name in self.names)
        return TensorLayout(names, lambda: {f"{owner}.{name}": wanted for name, wanted in self.targets().items()})


def match_layouts(
    targets: Mapping[str, Sequence[AnyTarget]], present: Collection[str]
) -> dict[str, Sequence[AnyTarget]]:
    """The targets by tensor name, in the layouts that a checkpoint with the tensors `present` has."""
    fitted: dict[str, Sequence[AnyTarget]] = {}
    for name, wanted in targets.items():
        layouts = wanted[0].layouts if wanted and name not in present else ()
        found = next((layout for layout in layouts if any(each in present for each in layout.names)), None)
        # A tensor may hold what several names of the model's own layout stand for.
        for own, more in {name: wanted}.items() if found is None else found.targets().items():
            fitted[own] = [*fitted[own], *more] if own in fitted else more
    return fitted
