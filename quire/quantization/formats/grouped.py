"""Packed integers of 2 to 8 bits with a scale, and often a zero point, per group of inputs: weight only.

All are re-laid into `GroupedWeight`, which holds 4 or 8 bits: 2 and 3 bits are held as 4, 5 to 7 as 8, with the codes
shifted so that (code - zero) * scale is the same.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.errors import CheckpointError
from quire.kernels.weights.base import Allocate, QuantizedWeight
from quire.kernels.weights.grouped import GroupedWeight
from quire.quantization.formats import checks
from quire.quantization.formats.base import StoredPart
from quire.quantization.formats.bits import (
    sparse_words_of,
    unpack_awq,
    unpack_dense,
    unpack_sparse,
    words_of,
)

_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class GroupedFormat(abc.ABC):
    """What the formats of packed integers share."""

    bits: int = 4
    group: int | None = 128
    """Inputs of a group; None: all inputs."""
    zeros: bool = False
    """Whether each group has a zero point; else it is the middle of the range."""
    ordered: bool = False
    """Whether inputs were grouped by their importance (act-order): a tensor says which group each is in."""

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """Its name, and what is particular about it."""
        ...

    @property
    def held(self) -> int:
        """Bits a code takes in memory."""
        return 4 if self.bits <= 4 else 8

    def describe(self) -> str:
        groups = "a scale per output" if self.group is None else f"groups of {self.group}"
        held = f" held as int{self.held}" if self.bits != self.held else ""
        zeros = "asymmetric" if self.zeros else "symmetric"
        order = ", inputs in act-order" if self.ordered else ""
        return f"int{self.bits}{held}, {groups}, {zeros}{order}, activations not quantized ({self.label})"

    @property
    @abc.abstractmethod
    def units(self) -> tuple[int, int]:
        """(outputs, inputs) that share a word, and so cannot be cut apart."""
        ...

    def check_cut(self, shape: tuple[int, int], rows: slice, columns: slice) -> None:
        outputs, inputs = self.units
        if checks.span(columns, shape[1]) != (0, shape[1]):
            if self.ordered:
                raise ValueError(
                    "the inputs of a matrix in act-order (desc_act) cannot be cut: those of a group are far apart; "
                    "use one tensor-parallel rank, or a checkpoint that was quantized without act-order"
                )
            group = 1 if self.group is None else self.group
            what = "groups of" if group % inputs == 0 else "whole words of whole groups:"
            checks.check_multiple(columns, shape[1], math.lcm(group, inputs), "inputs", what)
        if shape[1] % 2:
            raise ValueError(f"{shape[1]} inputs: their number must be even")
        checks.check_multiple(rows, shape[0], outputs, "outputs", "packed words of")

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, starts: Sequence[int] = (0,)
    ) -> GroupedWeight:
        group = shape[-1] if self.group is None else min(self.group, shape[-1])
        return GroupedWeight.allocate(shape, dtype, allocate, self.held, group, zeros=self.zeros, ordered=self.ordered)

    @abc.abstractmethod
    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]: ...

    @abc.abstractmethod
    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None: ...

    def _groups(self, shape: tuple[int, int], columns: slice) -> tuple[int, slice]:
        """(groups of a whole matrix, those that a rank reads)."""
        if self.group is None:
            return 1, slice(None)
        return -(-shape[1] // self.group), checks.shrink(columns, shape[1], self.group)

    @property
    def _typical_scale(self) -> float:
        """Gives random codes a standard deviation of 0.02."""
        return 0.02 * math.sqrt(12) / (1 << self.bits)

    def _indices(self, width: int) -> torch.Tensor:
        """Group indices for random weights: in order, or with the inputs shuffled."""
        indices = torch.arange(width, dtype=torch.int32) // (self.group or width)
        if not self.ordered:
            return indices
        return indices[torch.randperm(width, generator=torch.Generator().manual_seed(width))]

    def _write(
        self,
        weight: GroupedWeight,
        rows: slice,
        codes: torch.Tensor,
        scale: torch.Tensor,
        scale_name: str,
        zero: torch.Tensor | None,
    ) -> None:
        """Fill outputs from codes uint8 [out, in] as stored, scales [out, groups] and zero points like scales."""
        if not self.zeros:
            codes = codes + ((1 << (self.held - 1)) - (1 << (self.bits - 1)))
        checks.check_scale(scale_name, scale)
        held = scale.to(weight.scale.dtype)
        checks.check_scale(f"{scale_name} as {str(held.dtype).removeprefix('torch.')}", held)
        weight.write(rows, codes, held, zero if self.zeros else None)

    def _sort(
        self, codes: torch.Tensor, indices: torch.Tensor | None, weight: GroupedWeight, name: str
    ) -> torch.Tensor:
        """The codes with their inputs sorted by group, or as they are if the indices say that they are sorted."""
        if indices is None:
            if self.ordered:
                raise CheckpointError(f"{name}: missing from the checkpoint")
            return codes
        indices = indices.to(torch.int64)
        width = codes.shape[-1]
        expected = torch.arange(width, device=indices.device) // weight.group
        if not self.ordered:
            # A rank that keeps some of the inputs sees the indices of its own groups; -1 stands for "no order".
            if not bool((indices == -1).all()) and not torch.equal(indices - indices[0], expected):
                raise CheckpointError(
                    f"{name}: the inputs are not in the order of their groups, though the checkpoint's description "
                    "says so (desc_act or actorder)"
                )
            return codes
        order = torch.argsort(indices, stable=True)
        if not torch.equal(indices[order], expected):
            raise CheckpointError(f"{name}: does not put {weight.group} inputs into each group")
        assert weight.order is not None
        checks.check_agreement(weight.order, order.to(torch.int32), name, "one input (act-order)")
        return codes[:, order]


@dataclass(frozen=True)
class PackedFormat(GroupedFormat):
    """compressed-tensors' `pack-quantized`: rows packed along the inputs, zero points along the outputs."""

    @property
    def label(self) -> str:
        return "compressed-tensors"

    @property
    def units(self) -> tuple[int, int]:
        values = 32 // math.gcd(32, self.bits)
        return values if self.zeros else 1, values

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        height, width = shape
        count, groups = self._groups(shape, columns)
        int32 = (torch.int32,)
        # Widths that do not divide 32 were packed into whole words until 2026.
        per_word = 32 // self.bits
        start, stop = checks.span(columns, width)
        sparse = start % per_word == 0 and (stop % per_word == 0 or stop == width) and 32 % self.bits
        cut = checks.shrink(columns, width, per_word)
        older = (((height, sparse_words_of(width, self.bits)), (rows, cut)),) if sparse else ()
        parts = {
            "weight_packed": StoredPart(
                (height, words_of(width, self.bits)),
                int32,
                (rows, checks.shrink(columns, width, 32, self.bits)),
                also=older,
            ),
            "weight_scale": StoredPart(
                (height, count),
                (torch.bfloat16, torch.float16, torch.float32),
                (rows, groups),
                self._typical_scale,
                also=(((height,), (rows,)),) if count == 1 else (),
            ),
            "weight_shape": StoredPart((2,), (torch.int64, torch.int32), exact=lambda: torch.tensor(shape)),
        }
        if self.zeros:
            start, stop = checks.span(rows, height)
            sparse = start % per_word == 0 and (stop % per_word == 0 or stop == height) and 32 % self.bits
            cut = checks.shrink(rows, height, per_word)
            older = (((sparse_words_of(height, self.bits), count), (cut, groups)),) if sparse else ()
            parts["weight_zero_point"] = StoredPart(
                (words_of(height, self.bits), count),
                int32,
                (checks.shrink(rows, height, 32, self.bits), groups),
                also=older,
            )
        if self.ordered or self.group is not None:
            parts["weight_g_idx"] = StoredPart(
                (width,), (torch.int32, torch.int64), (columns,), exact=lambda: self._indices(width),
                optional=not self.ordered,
            )  # fmt: skip
        return parts

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        assert isinstance(weight, GroupedWeight)
        read = checks.on(weight.device, read)
        packed, scale = checks.need(read, "weight_packed"), checks.need(read, "weight_scale")
        height, width = packed.shape[0], weight.shape[-1]
        if "weight_shape" in read:
            whole = read["weight_shape"].tolist()
            if len(whole) != 2 or whole[0] < height or whole[1] < width:
                raise CheckpointError(f"weight_shape: {whole} is smaller than the {height} x {width} to read")
        # Few zero points may take as many words in either way: they are packed as the codes are.
        unpack = unpack_dense if packed.shape[1] == words_of(width, self.bits) else unpack_sparse
        codes = unpack(packed, self.bits, width)
        zero = None
        if self.zeros:
            zero = unpack(checks.need(read, "weight_zero_point").t(), self.bits, height).t()
        codes = self._sort(codes, read.get("weight_g_idx"), weight, "weight_g_idx")
        self._write(weight, rows, codes, scale.reshape(height, -1), "weight_scale", zero)


@dataclass(frozen=True)
class AwqFormat(GroupedFormat):
    """AutoAWQ's `gemm`: 4 bits, packed along the outputs in an order of their own."""

    zeros: bool = True

    @property
    def label(self) -> str:
        return "AWQ"

    @property
    def units(self) -> tuple[int, int]:
        return 8, 2

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        height, width = shape
        count, groups = self._groups(shape, columns)
        words = checks.shrink(rows, height, 8)
        zeros = (count, words_of(height, 4))
        return {
            "qweight": StoredPart((width, words_of(height, 4)), (torch.int32,), (columns, words)),
            "qzeros": StoredPart(
                zeros,
                (torch.int32,),
                (groups, words),
                optional=not self.zeros,
                exact=None if self.zeros else lambda: torch.full(zeros, 0x88888888 - (1 << 32), dtype=torch.int32),
            ),
            "scales": StoredPart((count, height), _SCALES, (groups, rows), self._typical_scale),
        }

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        assert isinstance(weight, GroupedWeight)
        read = checks.on(weight.device, read)
        scales = checks.need(read, "scales")
        height = scales.shape[1]
        codes = unpack_awq(checks.need(read, "qweight"))[:height]
        zero = None
        if self.zeros:
            zero = unpack_awq(checks.need(read, "qzeros"))[:height]
        elif "qzeros" in read and not bool((unpack_awq(read["qzeros"])[:height] == 8).all()):
            raise CheckpointError("qzeros: not all are 8, though the checkpoint's description says zero_point: false")
        self._write(weight, rows, codes, scales.t(), "scales", zero)


@dataclass(frozen=True)
class GptqFormat(GroupedFormat):
    """GPTQ's: 2, 3, 4 or 8 bits packed along the inputs, zero points along the outputs."""

    version: int = 1
    """1: zero points are stored less one; 2: as they are."""

    @property
    def label(self) -> str:
        return "GPTQ" if self.version == 1 else "GPTQ v2"

    @property
    def units(self) -> tuple[int, int]:
        values = 32 // math.gcd(32, self.bits)
        return values, values

    def stored(self, shape: tuple[int, int], rows: slice, columns: slice) -> Mapping[str, StoredPart]:
        height, width = shape
        count, groups = self._groups(shape, columns)
        zeros = (count, words_of(height, self.bits))
        down = checks.shrink(columns, width, 32, self.bits)
        across = checks.shrink(rows, height, 32, self.bits)
        return {
            "qweight": StoredPart((words_of(width, self.bits), height), (torch.int32,), (down, rows)),
            "qzeros": StoredPart(
                zeros, (torch.int32,), (groups, across),
                exact=None if self.zeros else lambda: self._symmetric_zeros(zeros),
            ),
            "scales": StoredPart((count, height), _SCALES, (groups, rows), self._typical_scale),
            "g_idx": StoredPart(
                (width,), (torch.int32, torch.int64), (columns,), exact=lambda: self._indices(width),
                optional=not self.ordered,
            ),
        }  # fmt: skip

    def place(self, read: Mapping[str, torch.Tensor], weight: QuantizedWeight, rows: slice) -> None:
        assert isinstance(weight, GroupedWeight)
        read = checks.on(weight.device, read)
        scales = checks.need(read, "scales")
        height, width = scales.shape[1], weight.shape[-1]
        codes = unpack_dense(checks.need(read, "qweight").t(), self.bits, width)
        zero = unpack_dense(checks.need(read, "qzeros"), self.bits, height).t()
        if self.version == 1:
            zero = (zero + 1) & ((1 << self.bits) - 1)
        middle = 1 << (self.bits - 1)
        if not self.zeros and not bool((zero == middle).all()):
            wrong = int(zero[zero != middle][0])
            raise CheckpointError(
                f"qzeros: a zero point is {wrong}, though the checkpoint's description says that it is symmetric "
                f"({middle}): is `sym` or `checkpoint_format` wrong?"
            )
        indices = None if self.group is None else read.get("g_idx")
        codes = self._sort(codes, indices, weight, "g_idx")
        self._write(weight, rows, codes, scales.t(), "scales", zero)

    def _symmetric_zeros(self, shape: tuple[int, int]) -> torch.Tensor:
        """Packed zero points in the middle of the range."""
        value = (1 << (self.bits - 1)) - (1 if self.version == 1 else 0)
        stream = sum(value << (place * self.bits) for place in range(32))
        words = [(stream >> (32 * place)) & 0xFFFFFFFF for place in range(self.bits)]
        signed = torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)
        return signed.repeat(-(-shape[1] // self.bits))[: shape[1]].expand(shape).contiguous()
