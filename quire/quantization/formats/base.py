"""What a checkpoint format implements, and what a scheme answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.kernels.weights.base import Allocate, QuantizedWeight


@dataclass(frozen=True)
class StoredPart:
    """One of the tensors that together store a matrix, and the part of it that a rank reads."""

    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    dtypes: tuple[torch.dtype, ...]
    """The dtypes it may have; the first is the usual one."""
    keep: tuple[slice, ...] = ()
    """The part this rank reads; missing dimensions are read whole."""
    sample: float | None = None
    """For random weights: None: codes of the full range; a number: values around it (scales)."""
    optional: bool = False
    """Whether a checkpoint may leave it out."""
    also: tuple[tuple[tuple[int, ...], tuple[slice, ...]], ...] = ()
    """Other shapes that checkpoints store it in, each with the part this rank reads: `place` tells them apart."""
    direct: str | None = None
    """The layout's tensor that it is copied to unchanged, without passing through `place`."""
    exact: Callable[[], torch.Tensor] | None = None
    """For random weights: makes the whole tensor, where its values are not free (group indices, shapes)."""

    def keep_of(self, shape: Sequence[int]) -> tuple[slice, ...] | None:
        """The part this rank reads of a stored tensor of this shape; None: it must not have this shape."""
        known = ((self.shape, self.keep), *self.also)
        return next((keep for expected, keep in known if tuple(shape) == tuple(expected)), None)


class Format(Protocol):
    """How a checkpoint stores a matrix [out, in] in few bits, and the layout it is re-laid into at load.

    Formats that are equal (frozen dataclasses) may share a fused weight.
    """

    def describe(self) -> str:
        """In a few words: `int4, groups of 128, asymmetric (AWQ)`."""
        ...

    def check_cut(self, shape: tuple[int, int], rows: slice, columns: slice) -> None:
        """Raise ValueError, naming the sizes that work, if a rank cannot keep this part of a matrix."""
        ...

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, starts: Sequence[int] = (0,)
    ) -> QuantizedWeight:
        """A weight without values of [out, in] or [experts, out, in]. `starts`: the outputs at which parts of a fused
        weight begin."""
        ...

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        """The tensors of a whole matrix `shape`, by the name after the module's ("weight_scale"), and what a rank that
        keeps these rows and columns reads of each."""
        ...

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        """Fill outputs `rows` of `weight` (one matrix) from the parts that were read. The tensors may be on the
        weight's device or on the host. Raises CheckpointError, naming the tensor (without the module), if one has
        values that cannot be or they contradict each other or the parts of the weight placed before."""
        ...


class Scheme(Protocol):
    """What a checkpoint says about its matrices."""

    name: str
    disagreements: list[str]
    """Where the checkpoint's description and its tensors disagree, in words; grows as modules are asked for."""

    def format_of(self, module: str) -> Format | None:
        """The format of the matrix of a module, by its full name in the checkpoint ("model.layers.0.mlp.up_proj");
        None: 16 bits. Raises CheckpointError or UnsupportedModelError with the module's name where it cannot say."""
        ...

    def ignores(self, tensor: str) -> bool:
        """Whether a tensor, by its full name, belongs to the scheme's bookkeeping and to no matrix (KV scales)."""
        ...
