"""GGUF's encodings kept packed: values equal the gguf package's, bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quire.kernels.weights.superblock import KINDS, SuperblockWeight
from tests.kernels.gguf_blocks import random_blocks

zeros = torch.zeros


def packed(name: str, rows: int = 6, width: int = 512, dtype: torch.dtype = torch.float32) -> tuple:
    raw = random_blocks(name, rows, width)
    weight = SuperblockWeight.allocate((rows, width), dtype, lambda shape, kind: zeros(shape, dtype=kind), KINDS[name])
    weight.write(slice(0, rows), torch.from_numpy(raw))
    return weight, torch.from_numpy(gguf.dequantize(raw, Kind[name]))


@pytest.mark.parametrize("name", KINDS)
def test_values_equal_the_packages_bit_by_bit(name: str) -> None:
    weight, expected = packed(name)
    assert weight.shape == expected.shape and expected.isfinite().all()
    assert torch.equal(weight.dequantize(), expected)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(packed_like(weight, dtype).dequantize(), expected.to(dtype))


def packed_like(weight: SuperblockWeight, dtype: torch.dtype) -> SuperblockWeight:
    return SuperblockWeight(weight.kind, weight.tensors, dtype)


@pytest.mark.parametrize("name", KINDS)
def test_memory_is_the_files(name: str) -> None:
    weight, _ = packed(name)
    kind = KINDS[name]
    assert (kind.block, kind.nbytes) == gguf.GGML_QUANT_SIZES[Kind[name]]
    file = weight.shape[0] * kind.row_bytes(weight.shape[1])
    # The 6-bit scales of some take a byte each here.
    assert weight.nbytes <= file * (1.04 if name == "Q3_K" else 1.03)
    assert weight.nbytes == file or name in ("Q3_K", "Q4_K", "Q5_K")


@pytest.mark.parametrize("name", ["Q4_1", "Q5_K", "Q6_K"])
def test_outputs_and_matrices_are_selected(name: str) -> None:
    weight, expected = packed(name)
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(weight.embedding(rows), expected[rows])
    assert torch.equal(weight[1:3].dequantize(), expected[1:3])
    stack = SuperblockWeight(
        weight.kind, {key: tensor.unflatten(0, (2, 3)) for key, tensor in weight.tensors.items()}, weight.dtype
    )
    assert stack.shape == (2, 3, 512) and stack[1].shape == (3, 512)
    assert torch.equal(stack[1].dequantize(), expected[3:])
    x = torch.randn(3, 512)
    torch.testing.assert_close(weight.linear(x), x @ expected.T)
    assert np.prod(stack.shape) == stack.numel()
