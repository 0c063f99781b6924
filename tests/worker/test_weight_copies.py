"""16-bit copies of weights in few bits: made where they fit, used for many rows, with the same values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.kernels.triton.ops import COPY_MIN_ROWS, TritonOps
from quire.kernels.weights.base import SplitWeight
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.grouped import GroupedWeight
from quire.kernels.weights.scaled import ScaledWeight
from quire.worker.weight_copies import make_copies


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def grouped(rows: int = 32, width: int = 128) -> GroupedWeight:
    weight = GroupedWeight.allocate((rows, width), torch.bfloat16, zeros, 4, 32)
    codes = torch.randint(0, 16, (rows, width), dtype=torch.uint8)
    weight.write(slice(0, rows), codes, torch.rand(rows, width // 32))
    return weight


class Layer(nn.Module):
    def __init__(self, weight: object) -> None:
        super().__init__()
        self.weight = weight


def test_copies_are_made_for_weight_only_matrices_where_all_of_them_fit():
    first, part, other = grouped(), grouped(), ScaledWeight.allocate((8, 128), torch.bfloat16, zeros, torch.int8)
    model = nn.ModuleList([Layer(first), Layer(SplitWeight([part, torch.zeros(4, 128)])), Layer(other)])
    size = 2 * 32 * 128 * 2
    assert make_copies(model, size - 1) == 0
    assert first.copy is None and part.copy is None
    assert make_copies(model, size) == size
    assert torch.equal(first.copy, first.dequantize()) and torch.equal(part.copy, part.dequantize())
    assert other.copy is None


@pytest.mark.parametrize("rows", [1, COPY_MIN_ROWS - 1, COPY_MIN_ROWS, 100])
def test_many_rows_are_multiplied_by_the_copy(rows: int):
    weight = grouped()
    weight.copy = torch.zeros(32, 128, dtype=torch.bfloat16)  # other values, to tell the two apart
    x = torch.randn(rows, 128, dtype=torch.bfloat16)
    found = TritonOps().linear(x, weight)
    assert bool(found.any()) == (rows < COPY_MIN_ROWS)


def test_stacks_of_experts_get_copies_after_the_matrices():
    matrix, stack = grouped(), Fp4Weight.allocate((3, 16, 64), torch.bfloat16, zeros)
    for index in range(3):
        scale = torch.randint(120, 130, (16, 2), dtype=torch.uint8)
        stack.write(index, torch.randint(0, 16, (16, 64), dtype=torch.uint8), scale)
    model, size = nn.ModuleList([Layer(matrix), Layer(stack)]), 2 * 32 * 128
    assert make_copies(model, size + 2 * 3 * 16 * 64 - 1) == size
    assert stack.copy is None and matrix.copy is not None
    assert make_copies(model, size + 2 * 3 * 16 * 64) == size + 2 * 3 * 16 * 64
    assert torch.equal(stack.copy, stack.dequantize())
