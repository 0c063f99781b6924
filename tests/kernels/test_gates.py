"""Activations of gated products, and addends before them."""

from __future__ import annotations

import math

import pytest
import torch

from quire.kernels.cpu.ops import CpuOps
from quire.kernels.gates import GATES
from quire.kernels.reference import TorchOps

SCALAR = {
    "silu": lambda g, u: g / (1 + math.exp(-g)) * u,
    "gelu": lambda g, u: 0.5 * g * (1 + math.erf(g / math.sqrt(2))) * u,
    "gelu_tanh": lambda g, u: 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
    "relu": lambda g, u: max(g, 0.0) * u,
    "relu2": lambda g, u: max(g, 0.0) ** 2 * u,
    "clamped_swiglu": lambda g, u: min(g, 7.0) / (1 + math.exp(-1.702 * min(g, 7.0))) * (max(min(u, 7.0), -7.0) + 1),
}


@pytest.mark.parametrize("name", sorted(GATES))
def test_an_activation_is_the_formula_it_names(name: str) -> None:
    gate_up = 6 * torch.randn(3, 10)
    expected = [[SCALAR[name](g, u) for g, u in zip(row[:5], row[5:], strict=True)] for row in gate_up.tolist()]
    torch.testing.assert_close(TorchOps().gate_mul(gate_up, name), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ops", [TorchOps, CpuOps])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_the_addend_comes_before_the_activation(ops: type[TorchOps], name: str) -> None:
    x, weight, bias, addend = torch.randn(4, 16), torch.randn(12, 16), torch.randn(12), torch.randn(4, 12)
    product = x.double() @ weight.double().T + bias.double() + addend.double()
    gate, up = product.chunk(2, dim=-1)
    found = ops().gated_linear(x, weight, bias, name, addend)
    torch.testing.assert_close(found.double(), GATES[name](gate, up), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ops().linear(x, weight, bias, addend).double(), product, rtol=1e-4, atol=1e-5)
