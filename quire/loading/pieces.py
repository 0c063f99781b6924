"""Cutting a load into pieces that threads can do in any order: some whole rows of a file, and where they go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from quire.errors import CheckpointError
from quire.loading.stored import Stored, kept_rows
from quire.loading.weights import Target

# What a thread does in one go: long enough a read for any disk, short enough that all threads end together.
PIECE = 8 << 20


@dataclass(frozen=True)
class LoadPiece:
    """Rows that are read once, and the targets that take their parts of them. A target's `keep` is of these rows."""

    rows: Stored
    targets: tuple[Target, ...]

    @property
    def size(self) -> int:
        """The bytes that are filled."""
        return sum(target.into.nbytes for target in self.targets)

    @property
    def device(self) -> torch.device:
        return self.targets[0].into.device

    @property
    def direct(self) -> torch.Tensor | None:
        """The place that takes the rows' bytes just as they are, if that is all there is to do."""
        target = self.targets[0]
        same = target.into.dtype == self.rows.dtype and target.into.is_contiguous()
        plain = not target.keep and target.arrange is None
        return target.into if same and plain and len(self.targets) == 1 else None

    def place(self, rows: torch.Tensor) -> None:
        """Copy each target's part of the rows, which are in the file's dtype and may be on the target's device."""
        for target in self.targets:
            copy_part(rows[target.keep], target, self.rows.name)


def copy_part(part: torch.Tensor, target: Target, name: str) -> None:
    """Arrange the kept part of the tensor `name` and copy it to its place."""
    arranged = part if target.arrange is None else target.arrange(part)
    _check_shape(tuple(arranged.shape), target, name)
    target.into.copy_(arranged)


def cut(stored: Stored, targets: Sequence[Target]) -> Iterator[LoadPiece]:
    """The pieces that fill a tensor's targets.

    A plain copy is cut by rows. What is arranged first needs its part whole: one piece, shared by all targets that
    are arranged from the same rows.
    """
    whole: dict[tuple[int, tuple[int, ...]], LoadPiece] = {}
    for target in targets:
        rows, keep = kept_rows(stored, target.keep)
        here = replace(target, keep=keep)
        if target.arrange is None and rows.shape and (not keep or keep[0] == slice(None)):
            yield from _cut_rows(rows, here)
        else:
            key = (rows.start, rows.shape)
            before = whole[key].targets if key in whole else ()
            whole[key] = LoadPiece(rows, (*before, here))
    yield from whole.values()


def _cut_rows(rows: Stored, target: Target) -> Iterator[LoadPiece]:
    _check_shape(_kept_shape(rows.shape, target.keep), target, rows.name)
    if not target.into.numel():
        return
    if not target.keep and target.into.is_contiguous():
        rows, target = rows.flat(), replace(target, into=target.into.view(-1))
    step = max(1, PIECE // rows.rows(0, 1).nbytes)
    if rows.shape[0] <= step:
        yield LoadPiece(rows, (target,))
        return
    for first in range(0, rows.shape[0], step):
        last = min(first + step, rows.shape[0])
        yield LoadPiece(rows.rows(first, last), (replace(target, into=target.into[first:last]),))


def _kept_shape(shape: tuple[int, ...], keep: tuple[slice, ...]) -> tuple[int, ...]:
    kept = (len(range(*part.indices(size))) for part, size in zip(keep, shape, strict=False))
    return (*kept, *shape[len(keep) :])


def _check_shape(shape: tuple[int, ...], target: Target, name: str) -> None:
    if shape != tuple(target.into.shape):
        raise CheckpointError(f"the part of {name!r} to keep has shape {shape}, its place {tuple(target.into.shape)}")
