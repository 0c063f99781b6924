"""Products with GGUF's blocks in Triton, against the weights dequantized by the layout's own plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gguf_blocks import random_blocks
from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

from quire.kernels.reference import TorchOps  # isort: skip
from quire.kernels.triton.ops import TritonOps  # isort: skip
from quire.kernels.triton.quantized import superblock  # isort: skip
from quire.kernels.triton.quantized.superblock import (  # isort: skip
    SuperblockConfig,
    SuperblockProducts,
    superblock_linear,
    superblock_values,
)
from quire.kernels.weights.superblock import KINDS, SuperblockWeight  # isort: skip

OUTPUTS = 20  # no multiple of a block
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def weight_of(name: str, outputs: int = OUTPUTS, dtype: torch.dtype = HALF) -> SuperblockWeight:
    width = 512 if KINDS[name].block == 256 else 96
    weight = SuperblockWeight.allocate(
        (outputs, width), dtype, lambda shape, kind: torch.zeros(shape, dtype=kind, device=DEVICE), KINDS[name]
    )
    weight.write(slice(0, outputs), torch.from_numpy(random_blocks(name, outputs, width)))
    return weight


def random(*size: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(size, device=DEVICE).to(dtype)


def check(out: torch.Tensor, x: torch.Tensor, weight: SuperblockWeight, bias: torch.Tensor | None = None) -> None:
    """Against float64, of unrounded weights."""
    exact = SuperblockWeight(weight.kind, weight.tensors, torch.float32).dequantize()
    expected = x.double() @ exact.double().T + (0 if bias is None else bias.double())
    assert out.shape == expected.shape and out.dtype == x.dtype
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[x.dtype], f"{weight}: {error:.1e}"


@pytest.mark.parametrize("name", KINDS)
def test_values_are_rounded_once(name: str) -> None:
    weight = weight_of(name)
    assert torch.equal(superblock_values(weight, HALF), weight.dequantize())
    rows = torch.tensor([3, 19, 3], device=DEVICE)
    ops = SuperblockProducts(TorchOps(), False)
    assert torch.equal(ops.embedding(rows, weight), weight.dequantize()[rows])


@pytest.mark.parametrize("name", KINDS)
def test_few_rows(name: str) -> None:
    x, weight, bias = random(3, weight_of(name).shape[1]), weight_of(name), random(OUTPUTS)
    check(superblock_linear(x, weight, bias), x, weight, bias)


CONFIGS = [SuperblockConfig(16, 16, 2, 2), SuperblockConfig(64 if ON_GPU else 32, 16, 1)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_1"])
def test_every_tile_shape_and_more_rows_than_a_tile(name: str, config: SuperblockConfig) -> None:
    weight = weight_of(name)
    x = random(19, weight.shape[1])
    check(superblock_linear(x, weight, None, config), x, weight)


def test_many_rows_are_multiplied_some_outputs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superblock, "MAX_ROWS", 4)
    monkeypatch.setattr(superblock, "SCRATCH_VALUES", 1)
    products = SuperblockProducts(TorchOps(), False)
    weight = weight_of("Q8_0", 150)
    x, bias = random(5, 96), random(150)
    check(products.linear(x, weight, bias), x, weight, bias)
    assert products.linear(x[:0], weight).shape == (0, 150)


def test_float32_keeps_every_bit_of_the_weights() -> None:
    weight = weight_of("Q4_1", dtype=torch.float32)
    x = random(3, 96, dtype=torch.float32)
    check(SuperblockProducts(TorchOps(), False).linear(x, weight), x, weight)


def test_batch_invariant_rows_do_not_depend_on_their_batch() -> None:
    weight = weight_of("Q4_0")
    x, products = random(70, 96), SuperblockProducts(TorchOps(), True)
    whole = products.linear(x, weight)
    check(whole, x, weight)
    for rows in (slice(0, 1), slice(60, 70)):
        part = products.linear(x[rows], weight)
        if ON_GPU:
            assert torch.equal(part, whole[rows])
        else:
            assert torch.allclose(part, whole[rows], rtol=2e-3, atol=2e-3)


def test_a_compiled_kernel_serves_every_row_count_of_its_tile() -> None:
    kernels = SuperblockProducts(TorchOps(), False).kernels_of(weight_of("Q4_K"), True, False, True, 16)
    assert len(kernels) == 2  # for up to 8 rows, and up to 16


@pytest.mark.parametrize("limit", [0, 100], ids=["dequantized", "pairs"])
def test_experts(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superblock, "MAX_PAIRS", limit)
    gate_up, down = stack_of("Q4_1", 3, 64, 32), stack_of("Q8_0", 3, 32, 32)
    x, weights = random(5, 32), torch.rand(5, 2, device=DEVICE)
    experts = torch.tensor([[0, 2], [2, 1], [1, 7], [-1, 0], [-1, -1]], dtype=torch.int32, device=DEVICE)
    out = SuperblockProducts(TritonOps(), False).experts(x, weights, experts, gate_up, down)
    dense = (stack.dequantize().float() for stack in (gate_up, down))
    expected = TorchOps().experts(x.float(), weights, experts, *dense)
    assert out.dtype == HALF
    assert ((out - expected).norm() / expected.norm()).item() < 2 * TOLERANCE[HALF]
    assert torch.equal(out[4], torch.zeros_like(out[4]))


def test_experts_with_biases() -> None:
    gate_up, down = stack_of("Q4_1", 3, 64, 32), stack_of("Q8_0", 3, 32, 32)
    x, weights, biases = random(2, 32), torch.rand(2, 1, device=DEVICE), (random(3, 64), random(3, 32))
    experts = torch.tensor([[2], [1]], dtype=torch.int32, device=DEVICE)
    out = SuperblockProducts(TritonOps(), False).experts(x, weights, experts, gate_up, down, "silu", *biases)
    for token, expert in enumerate((2, 1)):
        wide = x[token].float() @ gate_up[expert].dequantize().float().T + biases[0][expert].float()
        gate, up = wide.chunk(2)
        narrow = torch.nn.functional.silu(gate) * up
        expected = weights[token] * (narrow @ down[expert].dequantize().float().T + biases[1][expert].float())
        assert ((out[token] - expected).norm() / expected.norm()).item() < 2 * TOLERANCE[HALF]


def stack_of(name: str, count: int, outputs: int, width: int) -> SuperblockWeight:
    weight = SuperblockWeight.allocate(
        (count, outputs, width), HALF, lambda shape, kind: torch.zeros(shape, dtype=kind, device=DEVICE), KINDS[name]
    )
    for index in range(count):
        weight.write(index, torch.from_numpy(random_blocks(name, outputs, width, index)))
    return weight
