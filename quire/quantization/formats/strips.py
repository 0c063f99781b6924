"""Integer formats re-laid for a CPU's products (`StripWeight`), with activations in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quire.kernels.weights.base import Allocate, QuantizedWeight
from quire.kernels.weights.grouped import GroupedWeight
from quire.kernels.weights.packing import unpack
from quire.kernels.weights.scaled import ScaledWeight
from quire.kernels.weights.strips import LONGEST, StripWeight, can_strip
from quire.quantization.formats import checks
from quire.quantization.formats.base import Format, StoredPart
from quire.quantization.formats.bitnet import BitNetFormat
from quire.quantization.formats.grouped import GroupedFormat
from quire.quantization.formats.scaled import ScaledFormat


@dataclass(frozen=True)
class StripFormat:
    """A checkpoint's format, held in strips where its sizes allow it, else as the format itself holds it."""

    stored_as: Format

    @classmethod
    def of(cls, found: Format | None) -> Format | None:
        """The format for a CPU: this one for integers with float scales, others as they are."""
        is_integer = isinstance(found, (GroupedFormat, BitNetFormat)) or (
            isinstance(found, ScaledFormat) and found.code is torch.int8 and found.inputs != "tensor"
        )
        return cls(found) if found is not None and is_integer else found

    @property
    def rounds_activations(self) -> bool:
        """Whether activations are in 8 bits by the checkpoint's own description."""
        return isinstance(self.stored_as, BitNetFormat) or getattr(self.stored_as, "inputs", "none") == "token"

    def describe(self) -> str:
        return f"{self.stored_as.describe()}, packed for a CPU: activations in 8 bits"

    def check_cut(self, shape: tuple[int, int], rows: slice, columns: slice) -> None:
        self.stored_as.check_cut(shape, rows, columns)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, starts: Sequence[int] = (0,)
    ) -> QuantizedWeight:
        found, width = self.stored_as, shape[-1]
        if isinstance(found, GroupedFormat):
            group = width if found.group is None else min(found.group, width)
            if can_strip(width, group):
                return StripWeight.allocate(
                    shape, dtype, allocate, found.held, group, found.zeros, ordered=found.ordered
                )
        elif can_strip(width, width) and width <= LONGEST:
            bits = 2 if isinstance(found, BitNetFormat) else 8
            block = width if self.rounds_activations else None
            return StripWeight.allocate(shape, dtype, allocate, bits, width, block=block)
        return found.allocate(shape, dtype, allocate, starts)

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        parts = self.stored_as.stored(shape, rows, columns)
        return {name: replace(part, direct=None) for name, part in parts.items()}

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        if not isinstance(weight, StripWeight):
            self.stored_as.place(read, weight, rows)
            return
        first, last = checks.span(rows, weight.shape[-2])
        shape = (last - first, weight.shape[-1])
        plain = self.stored_as.allocate(shape, torch.float32, lambda size, kind: torch.zeros(size, dtype=kind))
        self.stored_as.place(read, plain, slice(0, last - first))
        if isinstance(plain, GroupedWeight):
            if weight.order is not None:
                assert plain.order is not None
                checks.check_agreement(weight.order, plain.order, "g_idx", "one input (act-order)")
            plain = plain.lined_up()
            weight.write(rows, unpack(plain.codes, plain.bits, plain.span), plain.scale, plain.zero)
            return
        assert isinstance(plain, ScaledWeight)
        codes = plain.codes.view(torch.uint8)
        codes = codes + 1 if weight.bits == 2 else codes ^ 0x80
        weight.write(rows, codes, plain.scale.unsqueeze(1))
