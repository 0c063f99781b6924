"""Loads tensors through a format as a loader does: compares shapes and dtypes, reads a rank's part, places it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.kernels.weights.base import QuantizedWeight


def zeros(shape, dtype):
    return torch.zeros(shape, dtype=dtype)


def read(found, tensors: Mapping[str, torch.Tensor], shape, rows=slice(None), columns=slice(None)):
    """What a rank reads of a matrix's tensors."""
    stored = found.stored(shape, rows, columns)
    unknown = tensors.keys() - stored.keys()
    assert not unknown, f"{unknown} are not of the format"
    parts = {}
    for name, part in stored.items():
        if name not in tensors:
            assert part.optional, f"{name} is missing"
            continue
        keep = part.keep_of(tensors[name].shape)
        assert keep is not None, f"{name}: {tuple(tensors[name].shape)}, not {part.shape} or {part.also}"
        assert tensors[name].dtype in part.dtypes, f"{name}: {tensors[name].dtype}, not {part.dtypes}"
        parts[name] = tensors[name][keep]
    return parts


def load(
    found, tensors, shape, rows=slice(None), columns=slice(None), dtype=torch.float32, into=None, at=0
) -> QuantizedWeight:
    """The weight of a rank that keeps these rows and columns; `into`: a fused weight, filled from output `at` on."""
    found.check_cut(shape, rows, columns)
    height, width = torch.empty(shape, device="meta")[rows, columns].shape
    weight = found.allocate((height, width), dtype, zeros) if into is None else into
    found.place(read(found, tensors, shape, rows, columns), weight, slice(at, at + height))
    return weight


def ranks(size: int, count: int) -> list[slice]:
    """Equal shares of `size`."""
    return [slice(size // count * rank, size // count * (rank + 1)) for rank in range(count)]


def check_cuts(found, tensors, shape, rows=(2, 3), columns=(2, 3)) -> None:
    """Every rank's part, of outputs and of inputs, equals a slice of the whole matrix."""
    whole = load(found, tensors, shape).dequantize()
    for count in rows:
        for part in ranks(shape[0], count):
            assert torch.equal(load(found, tensors, shape, rows=part).dequantize(), whole[part])
    for count in columns:
        for part in ranks(shape[1], count):
            assert torch.equal(load(found, tensors, shape, columns=part).dequantize(), whole[:, part])


def pack(values: torch.Tensor, bits: int, dense: bool = True) -> torch.Tensor:
    """Unsigned values [rows, n] as int32 words: bit by bit with Python's integers."""
    packed = []
    for row in values.tolist():
        words = []
        if dense:
            stream = sum(value << (bits * place) for place, value in enumerate(row))
            words = [(stream >> (32 * place)) & 0xFFFFFFFF for place in range(-(-len(row) * bits // 32))]
        else:
            per_word = 32 // bits
            for start in range(0, len(row), per_word):
                chunk = row[start : start + per_word]
                words.append(sum(value << (bits * place) for place, value in enumerate(chunk)))
        packed.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(packed, dtype=torch.int32)
