"""Integers of 2 to 8 bits in GGUF's blocks, re-laid as one plane a field (`SuperblockWeight`); weight only.

A GGUF file interleaves codes and scales block by block, at odd addresses. Here each field has a tensor of its own whose
rows are the matrix's rows, so that loads are aligned; codes keep the order they have inside a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.kernels.weights.base import Allocate, QuantizedWeight


@dataclass(frozen=True)
class Plane:
    """How `bits` of every value are packed into bytes: byte m of `run` bytes has value m + run * i at bit bits * i."""

    bits: int
    run: int = 1

    @property
    def span(self) -> int:
        """Values whose bits share the same bytes."""
        return self.run * (8 // self.bits)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """uint8 [..., bytes] as uint8 [..., values]."""
        runs = packed.unflatten(-1, (-1, self.run))
        mask = (1 << self.bits) - 1
        return torch.stack([(runs >> shift) & mask for shift in range(0, 8, self.bits)], -2).flatten(-3)


@dataclass(frozen=True)
class BlockKind:
    """An encoding of GGUF: value = d * scale * (code - zero) - m * minimum, with a scale and a minimum per `group`
    inputs and d and m per `block` inputs."""

    name: str
    block: int
    """Inputs of a block."""
    nbytes: int
    """Bytes of a block in the file."""
    group: int
    low: Plane
    """The low bits of a code."""
    high: Plane | None = None
    """Its high bits."""
    zero: int = 0
    scales: str = "none"
    """How scales are held: "none" (1: d is the scale), "int8", or "nibbles" (uint8, the minimum in the high nibble)."""
    minimums: str = "none"
    """How minimums are held: "none" (0), "block" (-1: value + m), "int8", or "nibbles" (in the scales)."""

    @property
    def held(self) -> dict[str, tuple[torch.dtype, int]]:
        """The tensors of a matrix: dtype, and inputs per element (codes: elements per 8 inputs, negative)."""
        planes = {"codes": (torch.uint8, -self.low.bits)}
        if self.high is not None:
            planes["high"] = (torch.uint8, -self.high.bits)
        if self.scales != "none":
            planes["scale"] = (torch.int8 if self.scales == "int8" else torch.uint8, self.group)
        if self.minimums == "int8":
            planes["minimum"] = (torch.int8, self.group)
        planes["d"] = (torch.float16, self.block)
        if self.minimums != "none":
            planes["m"] = (torch.float16, self.block)
        return planes

    def shape_of(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one of the `held` tensors of a matrix."""
        *lead, width = shape
        ratio = self.held[name][1]
        return (*lead, width // ratio if ratio > 0 else width * -ratio // 8)

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` inputs in the file."""
        return width // self.block * self.nbytes


KINDS = {
    kind.name: kind
    for kind in (
        BlockKind("Q4_0", 32, 18, 32, Plane(4, 16), zero=8),
        BlockKind("Q4_1", 32, 20, 32, Plane(4, 16), minimums="block"),
        BlockKind("Q5_0", 32, 22, 32, Plane(4, 16), Plane(1), zero=16),
        BlockKind("Q5_1", 32, 24, 32, Plane(4, 16), Plane(1), minimums="block"),
        BlockKind("Q8_0", 32, 34, 32, Plane(8), zero=128),
        BlockKind("Q2_K", 256, 84, 16, Plane(2, 32), scales="nibbles", minimums="nibbles"),
        BlockKind("Q3_K", 256, 110, 16, Plane(2, 32), Plane(1, 32), zero=4, scales="int8"),
        BlockKind("Q4_K", 256, 144, 32, Plane(4, 32), scales="int8", minimums="int8"),
        BlockKind("Q5_K", 256, 176, 32, Plane(4, 32), Plane(1, 32), scales="int8", minimums="int8"),
        BlockKind("Q6_K", 256, 210, 16, Plane(4, 64), Plane(2, 32), zero=32, scales="int8"),
    )
}
"""By GGUF's name."""


def split_blocks(kind: BlockKind, blocks: torch.Tensor) -> dict[str, torch.Tensor]:
    """The fields of blocks uint8 [..., bytes of whole blocks], as the tensors that `BlockKind.held` names."""
    raw = blocks.unflatten(-1, (-1, kind.nbytes))
    fields = {name: raw[..., start:stop] for name, (start, stop) in _FIELDS[kind.name].items()}
    parts: dict[str, torch.Tensor] = {
        name: fields[name].contiguous().view(torch.float16) for name in ("d", "m") if name in fields
    }
    if kind.name == "Q8_0":  # signed in the file
        parts["codes"] = fields["codes"] ^ 0x80
    else:
        parts |= {name: fields[name] for name in ("codes", "high") if name in fields}
    if kind.name in ("Q4_K", "Q5_K"):
        parts |= dict(zip(("scale", "minimum"), _six_bit_pairs(fields["scale"]), strict=True))
    elif kind.name == "Q3_K":
        parts["scale"] = _six_bit_scales(fields["scale"])
    elif "scale" in fields:
        parts["scale"] = fields["scale"]
    held = kind.held
    return {
        name: (part if name in ("d", "m") else part.contiguous().view(held[name][0])).flatten(-2)
        for name, part in parts.items()
    }


_FIELDS: dict[str, dict[str, tuple[int, int]]] = {
    "Q4_0": {"d": (0, 2), "codes": (2, 18)},
    "Q4_1": {"d": (0, 2), "m": (2, 4), "codes": (4, 20)},
    "Q5_0": {"d": (0, 2), "high": (2, 6), "codes": (6, 22)},
    "Q5_1": {"d": (0, 2), "m": (2, 4), "high": (4, 8), "codes": (8, 24)},
    "Q8_0": {"d": (0, 2), "codes": (2, 34)},
    "Q2_K": {"scale": (0, 16), "codes": (16, 80), "d": (80, 82), "m": (82, 84)},
    "Q3_K": {"high": (0, 32), "codes": (32, 96), "scale": (96, 108), "d": (108, 110)},
    "Q4_K": {"d": (0, 2), "m": (2, 4), "scale": (4, 16), "codes": (16, 144)},
    "Q5_K": {"d": (0, 2), "m": (2, 4), "scale": (4, 16), "high": (16, 48), "codes": (48, 176)},
    "Q6_K": {"codes": (0, 128), "high": (128, 192), "scale": (192, 208), "d": (208, 210)},
}
"""Where the fields lie in a block of the file."""


def set_halves(kind: BlockKind, blocks: torch.Tensor, size: float) -> None:
    """Set d and m of blocks uint8 [..., bytes of a block] with random codes and scales: values are about `size`."""
    code = 1 << kind.low.bits + (0 if kind.high is None else kind.high.bits)
    scale = {"none": 1, "nibbles": 16, "int8": 64}[kind.scales]
    values = {"d": 2 * size / (code * scale), "m": -size if kind.minimums == "block" else size / scale}
    for name in values.keys() & _FIELDS[kind.name].keys():
        start, stop = _FIELDS[kind.name][name]
        blocks[..., start:stop] = torch.tensor([values[name]]).half().view(torch.uint8)


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minimums of 6 bits from 12 bytes: the last four bytes hold the low nibbles of pairs 4 to
    7, whose top bits are those of the first eight bytes."""
    scale, minimum, low = packed.unflatten(-1, (3, 4)).unbind(-2)
    return (
        torch.cat((scale & 63, (low & 15) | ((scale >> 2) & 48)), -1),
        torch.cat((minimum & 63, (low >> 4) | ((minimum >> 2) & 48)), -1),
    )


def _six_bit_scales(packed: torch.Tensor) -> torch.Tensor:
    """Sixteen scales of -32 to 31 from 12 bytes: low nibbles in the first eight, top bits in the last four."""
    low, high = packed[..., :8], packed[..., 8:]
    low = torch.cat((low & 15, low >> 4), -1)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    return (low | (high << 4)).view(torch.int8) - 32


def block_values(kind: BlockKind, codes: torch.Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
    """The values of codes [..., out, in] in float32, each rounded at most once. `held`: scales and minimums by name."""
    d = held["d"].float().repeat_interleave(kind.block // kind.group, -1)
    packed = kind.scales == "nibbles"
    if kind.scales != "none":
        d = d * (held["scale"] & 15 if packed else held["scale"]).float()
    values = (codes.float() - kind.zero) * d.repeat_interleave(kind.group, -1)
    if kind.minimums == "none":
        return values
    m = held["m"].float().repeat_interleave(kind.block // kind.group, -1)
    if kind.minimums == "block":
        m = -m
    else:
        m = m * (held["scale"] >> 4 if packed else held["minimum"]).float()
    return values - m.repeat_interleave(kind.group, -1)


class SuperblockWeight(QuantizedWeight):
    """A matrix in one of `KINDS`: its fields by name, as `BlockKind.held` lists them.

    codes, high  uint8 [..., out, bytes]: codes in the block's own order (`Plane`); Q8_0's are unsigned here
    scale, minimum int8 or uint8 [..., out, groups]
    d, m         float16 [..., out, blocks]

    Products of d, a scale and a code are exact in float32: a value is rounded once in float32, when the minimum is
    subtracted, and once to `dtype`.
    """

    def __init__(self, kind: BlockKind, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.kind, self.dtype = kind, dtype
        self._tensors = tensors
        codes = tensors["codes"]
        self.shape = torch.Size((*codes.shape[:-1], codes.shape[-1] * 8 // kind.low.bits))

    @classmethod
    def allocate(
        cls, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate, kind: BlockKind
    ) -> SuperblockWeight:
        """One without values."""
        held = kind.held
        return cls(kind, {name: allocate(kind.shape_of(name, shape), held[name][0]) for name in held}, dtype)

    def write(self, index: slice | int, blocks: torch.Tensor) -> None:
        """Fill some outputs (of a stack: a matrix) from the file's blocks, uint8 [..., bytes]."""
        for name, part in split_blocks(self.kind, blocks.to(self.device)).items():
            self._tensors[name][index] = part

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def with_tensors(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> SuperblockWeight:
        return SuperblockWeight(self.kind, tensors, self.dtype)

    @property
    def flat(self) -> SuperblockWeight:
        """A stack's matrices one above the other."""
        tensors = {name: tensor.flatten(0, -2) for name, tensor in self._tensors.items()}
        return SuperblockWeight(self.kind, tensors, self.dtype)

    def codes(self) -> torch.Tensor:
        """The codes, uint8 [..., out, in]."""
        low = self.kind.low.unpack(self._tensors["codes"])
        if self.kind.high is None:
            return low
        return low | (self.kind.high.unpack(self._tensors["high"]) << self.kind.low.bits)

    def dequantize(self) -> torch.Tensor:
        return block_values(self.kind, self.codes(), self._tensors).to(self.dtype)

    @property
    def layout(self) -> tuple[object, ...]:
        return (*super().layout, self.kind.name)
