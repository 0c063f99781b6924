"""`ScaledProducts`: which kernels run for a product, and that all of them together do what `Ops` says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

from quire.kernels.reference import TorchOps  # isort: skip
from quire.kernels.triton.ops import TritonOps  # isort: skip
from quire.kernels.triton.quantized import scaled  # isort: skip
from quire.kernels.triton.quantized.w8 import choice  # isort: skip
from quire.kernels.triton.skinny_gemm.common import GemmConfig  # isort: skip
from quire.kernels.weights.scaled import BlockScaledWeight, ScaledWeight  # isort: skip

EPS = 1e-5
N, K = 48, 160
FORMS = ["fp8", "int8", "static", "values", "blocks"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in the interpreter too, on tiles that it computes in time."""
    monkeypatch.setattr(scaled, "USE_OWN_GEMMS", True)
    if not ON_GPU:
        monkeypatch.setattr(scaled, "choose", lambda *shape: smaller(choice.choose(*shape)))
        monkeypatch.setattr(scaled, "INVARIANT", smaller(choice.INVARIANT))


def smaller(config: GemmConfig) -> GemmConfig:
    return replace(config, block_n=16, block_m=min(config.block_m, 32), block_k=128, programs=0)


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, device=DEVICE)


def weight_of(form: str, n: int = N) -> ScaledWeight | BlockScaledWeight:
    code = torch.int8 if form == "int8" else torch.float8_e4m3fn
    codes = (random(n, K) * 40).clamp(-127, 127).to(code)
    if form == "blocks":
        return BlockScaledWeight(codes, torch.rand(n // 16, 2, device=DEVICE) / 400, HALF, (16, 128))
    scale = torch.rand(n, device=DEVICE) / 400
    inputs = {"static": "tensor", "values": "none"}.get(form, "token")
    return ScaledWeight(codes, scale, HALF, inputs, torch.full((1,), 0.02, device=DEVICE) if form == "static" else None)


def assert_near(out: torch.Tensor, expected: torch.Tensor, share: float = 4 * torch.finfo(HALF).eps) -> None:
    """Within a few roundings of the largest value: a normed input may be rounded to the next code."""
    assert out.shape == expected.shape and out.dtype == expected.dtype
    assert (out.float() - expected.float()).abs().max() <= share * expected.float().abs().max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("invariant", [False, True])
def test_products_are_those_of_the_reference(form: str, invariant: bool) -> None:
    products = TritonOps(invariant).quantized(weight_of(form))
    weight, wide = weight_of(form), weight_of(form, 2 * N)
    bias = random(N).to(HALF)
    for rows in (3,) if invariant else (1, 3, 40):
        x = random(rows, K).to(HALF)
        assert_near(products.linear(x, weight, bias), weight.linear(x, bias))
    x = random(1 + invariant, K).to(HALF)
    assert_near(products.gated_linear(x, wide), TorchOps().silu_mul(wide.linear(x)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_norm_and_a_residual_come_before(form: str, rows: int) -> None:
    products, weight = TritonOps().quantized(weight_of(form)), weight_of(form)
    gain = random(K).to(HALF)
    for has_x, has_residual in ((True, True), (True, False), (False, True)):
        x = random(rows, K).to(HALF) if has_x else None
        residual = random(rows, K).to(HALF) if has_residual else None
        total = x + residual if x is not None and residual is not None else x if residual is None else residual.clone()
        assert total is not None
        out, stream = products.norm_linear(x, residual, gain, EPS, weight)
        assert torch.equal(stream, total)
        assert_near(out, weight.linear(TorchOps().rms_norm(total, gain, EPS)), 2e-2)


@pytest.mark.parametrize("form", FORMS)
def test_products_of_many_rows_are_added_to_the_stream(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "FUSED_ADD_MIN_ROWS", 4)
    monkeypatch.setattr(scaled, "DEQUANTIZED_MIN_ROWS", 4)
    products, weight = TritonOps().quantized(weight_of(form)), weight_of(form)
    for rows in (3, 5):
        x, stream = random(rows, K).to(HALF), random(rows, N).to(HALF)
        expected = stream + weight.linear(x)
        product = products.linear_add(stream, x, weight)
        assert (product is None) == (rows == 5 and form != "values")
        assert_near(stream if product is None else stream + product, expected)


def test_shapes_without_a_kernel_run_the_reference() -> None:
    weight = ScaledWeight(torch.ones(8, 24, dtype=torch.int8, device=DEVICE), torch.ones(8, device=DEVICE), HALF)
    x = random(2, 24).to(HALF)
    assert torch.equal(TritonOps().quantized(weight).linear(x, weight), weight.linear(x))


@pytest.mark.parametrize("form", FORMS)
def test_each_kernel_to_compile_is_listed_once(form: str) -> None:
    weight = weight_of(form)
    found = TritonOps().quantized(weight).kernels_of(weight, True, False, False, 4096)
    assert found
    assert len({str(kernel) for kernel in found}) == len(found)
