"""Weights whose codes are packed as words: eight of their outputs may lie side by side (`packing.LINES`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from quire.kernels.weights.base import QuantizedWeight
from quire.kernels.weights.packing import LINES, place_lines, take_lines

if TYPE_CHECKING:
    from typing_extensions import Self


class WordLines(QuantizedWeight):
    """A weight with `codes` in words of `span` inputs, if it has a span."""

    bits: int
    span: int | None
    side_by_side = False
    """Whether LINES outputs lie side by side, in all tensors that have more than one value an output."""

    @staticmethod
    def lies_side_by_side(lines: int, span: int | None) -> bool:
        """Whether a new weight of so many outputs lies so."""
        return span is not None and lines % LINES == 0

    def lined_up(self) -> Self:
        """The same weight with each output in one piece."""
        return self.select(slice(None)) if self.side_by_side else self

    def select(self, index: torch.Tensor | slice | int) -> Self:
        if not self.side_by_side:
            return super().select(index)
        lines = torch.arange(self.shape[0], device=self.device)[index]
        taken = {
            name: tensor[lines] if tensor.dim() == 1 else take_lines(tensor, lines, self._run(name))
            for name, tensor in self.tensors.items()
        }
        made = self.with_tensors(taken, (len(lines), self.shape[1]))
        made.side_by_side = False
        return made

    def _fill(self, index: slice | int, values: Mapping[str, torch.Tensor]) -> None:
        """Write some outputs of tensors, by name; of a stack, a matrix."""
        held = self.tensors
        for name, each in values.items():
            into = held[name]
            if self.side_by_side and into.dim() > 1:
                assert isinstance(index, slice)
                place_lines(into, index, each, self._run(name))
            else:
                into[index] = each.to(into.device, into.dtype)

    def _run(self, name: str) -> int:
        """Values of an output that lie together: half a span of codes (bytes), one scale."""
        if name != "codes":
            return 1
        assert self.span is not None
        return self.span * self.bits // 16
