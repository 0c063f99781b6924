"""Products with 4- and 8-bit weights against float64 products with the dequantized matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.reference import TorchOps
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.quantized import weight_only
from quire.kernels.triton.quantized.dequantize import dequantize
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, as_words
from quire.kernels.triton.quantized.weight_only import WeightOnlyProducts, run
from quire.kernels.weights.fp4 import Fp4Weight
from quire.kernels.weights.grouped import GroupedWeight
from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

EPS = 1e-5
TOLERANCE = 6e-3 if HALF is torch.bfloat16 else 1e-3

FEW = WeightOnlyConfig("few", 16, 8, warps=2, depth=2)
TILE = WeightOnlyConfig("tile", 128 if ON_GPU else 16, 32, warps=4, depth=3)
KINDS: list[dict[str, Any]] = [
    {"bits": 4, "group": 128, "zeros": True},
    {"bits": 4, "group": 32, "minimums": True},
    {"bits": 4, "group": 64},
    {"bits": 8, "group": 64, "zeros": True},
    {"bits": 8, "group": 1 << 20, "minimums": True},
    {"bits": 8, "group": 32},
    {"nvidia": False},
    {"nvidia": True},
]


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def random_weight(n: int, k: int, ordered: bool = False, **kind: Any) -> GroupedWeight | Fp4Weight:
    """Codes of the full range; values about 0.1."""
    if "nvidia" in kind:
        fp4 = Fp4Weight.allocate((n, k), HALF, allocate, **kind)
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        if kind["nvidia"]:
            fp4.write(slice(None), codes, (torch.rand(fp4.scale.shape) * 4).to(torch.float8_e4m3fn), torch.rand(n) / 50)
        else:
            fp4.write(slice(None), codes, torch.randint(118, 124, fp4.scale.shape, dtype=torch.uint8))
        return fp4
    weight = GroupedWeight.allocate((n, k), HALF, allocate, ordered=ordered, **kind)
    groups, most = weight.scale.shape, 1 << kind["bits"]
    weight.write(
        slice(None), torch.randint(0, most, (n, k), dtype=torch.uint8), (torch.rand(groups) + 0.1) / most,
        torch.randint(0, most, groups, dtype=torch.uint8), torch.randn(groups) / 10,
    )  # fmt: skip
    if weight.order is not None:
        weight.order.copy_(torch.randperm(k))
    return weight


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=HALF, device=DEVICE)


def expected(x: torch.Tensor, weight: GroupedWeight | Fp4Weight, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    out = x.double() @ weight.dequantize().double().T
    if bias is not None:
        out += bias.double()
    if silu:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out


def assert_close(out: torch.Tensor, right: torch.Tensor) -> None:
    assert out.shape == right.shape
    error = ((out.double() - right).norm() / right.norm()).item()
    assert error < TOLERANCE, f"relative error {error:.1e}"


def check(config: WeightOnlyConfig, weight: GroupedWeight | Fp4Weight, rows: int, silu: bool = False) -> None:
    words = as_words(weight)
    assert words is not None
    x, bias = random(rows, weight.shape[1]), random(weight.shape[0])
    assert_close(run(WeightOnlyGemm(x, words, bias, silu=silu), config), expected(x, weight, bias, silu))


@pytest.mark.parametrize("config", [FEW, TILE], ids=lambda config: config.kernel)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_weight(kind: dict[str, Any], config: WeightOnlyConfig) -> None:
    check(config, random_weight(40, 256, **kind), 3)


@pytest.mark.parametrize("config", [FEW, TILE], ids=lambda config: config.kernel)
@pytest.mark.parametrize("k", [64, 128, 320, 576])
def test_any_number_of_spans(k: int, config: WeightOnlyConfig) -> None:
    check(config, random_weight(48, k, bits=4, group=32, zeros=True), 3, silu=True)


@pytest.mark.parametrize(
    "config, rows",
    [
        (FEW, 1),
        (FEW, 8),
        (replace(FEW, block_n=32, block_m=16), 13),
        (replace(FEW, programs=1, depth=4), 5),
        (TILE, 1),
        (TILE, 17),
        (TILE, 70),
        (replace(TILE, split=2), 17),
        (replace(TILE, programs=1), 70),
    ],
)
@pytest.mark.parametrize("silu", [False, True])
def test_any_number_of_rows(config: WeightOnlyConfig, rows: int, silu: bool) -> None:
    check(config, random_weight(80, 384, bits=4, group=128, zeros=True), rows, silu)


@pytest.mark.parametrize("outputs", [42, 44])
@pytest.mark.parametrize("config", [FEW, TILE], ids=lambda config: config.kernel)
def test_outputs_that_are_no_eights(config: WeightOnlyConfig, outputs: int) -> None:
    check(config, random_weight(outputs, 256, bits=4, group=64, zeros=True), 3)


@pytest.mark.parametrize("outputs", [40, 42])
def test_a_gate_of_no_eights_is_applied_after_a_tile(outputs: int, products: WeightOnlyProducts) -> None:
    weight = random_weight(outputs, 256, bits=4, group=64, zeros=True)
    x = random(3, 256)
    words = as_words(weight)
    assert words is not None
    with pytest.raises(ValueError, match=f"{outputs} outputs"):
        run(WeightOnlyGemm(x, words, silu=True), TILE)
    products.invariant = True
    assert_close(products.gated_linear(x, weight), expected(x, weight, None, silu=True))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_dequantized_values_are_the_references_bit_by_bit(kind: dict[str, Any]) -> None:
    weight = random_weight(40, 576, **kind)
    words = as_words(weight)
    assert words is not None
    out = dequantize(words, torch.full(weight.shape, float("nan"), dtype=HALF, device=DEVICE))
    right = weight.dequantize()
    if ON_GPU and kind.get("minimums"):
        # On the GPU code * scale + minimum is rounded once; the reference rounds it to float32 first.
        assert ((out - right).abs() <= 0.01 * right.abs()).all()
        assert (out != right).float().mean() < 1e-3
    else:
        assert torch.equal(out, right)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> WeightOnlyProducts:
    monkeypatch.setattr(weight_only, "USE_KERNELS", True)
    return WeightOnlyProducts(TritonOps(), batch_invariant=False)


def test_inputs_may_be_stored_in_another_order(products: WeightOnlyProducts) -> None:
    weight = random_weight(40, 128, bits=4, group=32, zeros=True, ordered=True)
    for rows in (1, 3):
        x = random(rows, 128)
        assert_close(products.linear(x, weight), expected(x, weight, None, silu=False))


@pytest.mark.parametrize("ordered", [False, True])
def test_a_norm_precedes_the_product(ordered: bool, products: WeightOnlyProducts) -> None:
    weight = random_weight(40, 128, bits=4, group=32, ordered=ordered)
    x, residual, gain = random(1, 128), random(1, 128), random(128)
    total = x + residual
    out, stream = products.norm_linear(x, residual.clone(), gain, EPS, weight)
    assert torch.equal(stream, total)
    assert_close(out, expected(TorchOps().rms_norm(total.double(), gain.double(), EPS), weight, None, silu=False))


def test_many_rows_multiply_the_dequantized_matrix(products: WeightOnlyProducts) -> None:
    products.config = WeightOnlyConfig("dequantize")
    weight, bias = random_weight(40, 128, bits=4, group=32, zeros=True), random(40)
    x = random(5, 128)
    assert_close(products.linear(x, weight, bias), expected(x, weight, bias, silu=False))
    assert_close(products.gated_linear(x, weight, bias), expected(x, weight, bias, silu=True))
    stream = random(5, 40)
    added = products.linear_add(stream.clone(), x, weight)
    assert added is not None
    assert_close(added, expected(x, weight, None, silu=False))


def test_what_the_kernels_do_not_support_is_computed_in_plain_torch(products: WeightOnlyProducts) -> None:
    weight = random_weight(40, 48, bits=4, group=16, zeros=True)
    assert as_words(weight) is None
    x = random(3, 48)
    assert_close(products.linear(x, weight), expected(x, weight, None, silu=False))


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 64, 100, 256, 300, 1000, 5000])
@pytest.mark.parametrize("shape", [(4096, 14336), (576, 576), (28672, 4096), (64, 28672)])
def test_every_row_count_has_a_kernel_for_as_many_rows(rows: int, shape: tuple[int, int]) -> None:
    config = weight_only.choose(shape[0], shape[1] // 64, rows)
    assert config.kernel != "few" or rows <= config.block_m
    # Up to 128 rows a tile, where the weight has whole ones, is faster than to dequantize the matrix; beyond 256 never.
    if rows <= 128 and shape[0] % 256 == 0:
        assert config.kernel != "dequantize"
    elif rows > 256:
        assert config.kernel == "dequantize"


def test_kernels_are_listed_for_compilation(products: WeightOnlyProducts) -> None:
    weight = random_weight(256, 1024, bits=4, group=32, zeros=True)
    kernels = products.kernels_of(weight, normed=True, gated=True, bias=False, max_rows=64)
    assert {kernel.config.kernel for kernel in kernels} == {"few", "tile"}
    assert len({kernel.key for kernel in kernels}) == len(kernels)


@pytest.mark.skipif(not ON_GPU, reason="numpy's sums depend on the number of rows")
def test_batch_invariant_rows_have_the_same_bits_in_any_batch() -> None:
    products = WeightOnlyProducts(TritonOps(batch_invariant=True), batch_invariant=True)
    weight = random_weight(512, 1024, bits=4, group=128, zeros=True)
    x = random(300, 1024)
    whole = products.linear(x, weight)
    for rows in (1, 7, 64, 65, 200):
        assert torch.equal(products.linear(x[:rows].contiguous(), weight), whole[:rows])
