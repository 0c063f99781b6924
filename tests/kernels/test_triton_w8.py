"""Products with weights in 8-bit codes, in Triton, against the reference products in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

from quire.kernels.reference import TorchOps  # isort: skip
from quire.kernels.triton.ops import TritonOps  # isort: skip
from quire.kernels.triton.quantized import scaled  # isort: skip
from quire.kernels.triton.quantized.w8.activations import quantize  # isort: skip
from quire.kernels.triton.quantized.w8.large import large_launch  # isort: skip
from quire.kernels.triton.quantized.w8.tile import CodedGemm, tile_launch  # isort: skip
from quire.kernels.triton.quantized.w8.vector import VectorGemm, vector_launch  # isort: skip
from quire.kernels.triton.skinny_gemm.common import GemmConfig, GemmLaunch  # isort: skip
from quire.kernels.weights.scaled import BlockScaledWeight, ScaledWeight, quantize_rows  # isort: skip

FP8, INT8 = torch.float8_e4m3fn, torch.int8
EPS = 1e-5
# Small enough for the interpreter: 40 outputs (with a gate 80) and 96 inputs are not multiples of any block.
N, K = 40, 96
WIDE = 64 if ON_GPU else 16
DEPTH = 64 if ON_GPU else 32


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, device=DEVICE)


def random_codes(code: torch.dtype, *size: int) -> torch.Tensor:
    """Codes of the full range, without NaN."""
    bits = torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE)
    if code is FP8:
        bits[(bits & 127) == 127] = 0
    return bits.view(code)


def random_weight(code: torch.dtype, n: int = N, k: int = K, inputs: str = "token") -> ScaledWeight:
    scale = (torch.rand(n, device=DEVICE) + 0.5) / (100 * k**0.5)
    static = torch.full((1,), 0.02, device=DEVICE) if inputs == "tensor" else None
    return ScaledWeight(random_codes(code, n, k), scale, HALF, inputs, static)


def launched(launch: GemmLaunch) -> torch.Tensor:
    launch.kernel[(launch.programs,)](*launch.arguments, **launch.constants)
    return launch.out


def awkward_rows(rows: int, k: int = K) -> torch.Tensor:
    """Rows of different sizes, one of zeros, one with a value far larger than the others."""
    x = random(rows, k) * 10 ** torch.linspace(-3, 3, rows, device=DEVICE)[:, None]
    if rows > 2:
        x[1] = 0
        x[2, 5] = 1000
    return x.to(HALF)


@pytest.mark.parametrize("code", [FP8, INT8])
@pytest.mark.parametrize("rows", [1, 17])
def test_quantized_rows_are_those_of_the_reference(code: torch.dtype, rows: int) -> None:
    x = awkward_rows(rows)
    found = quantize(x, code)
    codes, scale = quantize_rows(x, code)
    assert torch.equal(found.codes.float(), codes.float())
    assert found.scale is not None
    assert torch.equal(found.scale, scale.squeeze(-1))


def test_values_past_a_static_scale_saturate() -> None:
    x = awkward_rows(3)
    for code in (FP8, INT8):
        weight = random_weight(code, inputs="tensor")
        found = quantize(x, code, weight.input_scale)
        codes, scale = weight.encode_input(x)
        assert torch.equal(found.codes.float(), codes.float())
        assert found.codes.float().abs().max() == (448 if code is FP8 else 127)
        assert found.scale is not None
        assert torch.equal(found.scale, scale.squeeze(-1))


def test_groups_of_a_row_have_scales_of_their_own() -> None:
    x = awkward_rows(3, 300)  # the last group is not full
    found = quantize(x, FP8, group=128)
    codes, scale = quantize_rows(x, FP8, 128)
    assert torch.equal(found.codes.float(), codes.float())
    assert found.scale is not None
    assert torch.equal(found.scale.T, scale)


@pytest.mark.parametrize("residual", [False, True])
def test_the_norm_before_quantization_is_fused(residual: bool) -> None:
    x, gain = random(5, K).to(HALF), random(K).to(HALF)
    carried = random(5, K).to(HALF) if residual else None
    total = x if carried is None else x + carried
    normed = TorchOps().rms_norm(total, gain, EPS)
    found = quantize(x, INT8, gain=gain, eps=EPS, residual=carried)
    codes, scale = quantize_rows(normed, INT8)
    # The gain is multiplied first here: rarely a normed value is rounded the other way.
    assert found.scale is not None
    assert torch.allclose(found.scale, scale.squeeze(-1), rtol=2e-3)
    assert (found.codes.int() - codes.int()).abs().max() <= 1
    assert ((found.codes != codes).float().mean()) < 0.05
    assert carried is None or torch.equal(carried, total)


CONFIGS = [
    pytest.param(GemmConfig("vector", 4, warps=1), id="vector"),
    pytest.param(GemmConfig("vector", 4, warps=1, programs=1), id="vector-persistent"),
    pytest.param(GemmConfig("tile", WIDE, 16, DEPTH, 4, 3), id="tile"),
    pytest.param(GemmConfig("tile", WIDE, 16, DEPTH, 4, 3, tma=True, split=2), id="tile-split"),
    pytest.param(GemmConfig("tile", WIDE, 32, DEPTH, 4, 3, programs=1), id="tile-stream"),
    pytest.param(GemmConfig("large", 2 * WIDE, 16 if not ON_GPU else 128, DEPTH, 8, 3, programs=1), id="large"),
]


def product(
    config: GemmConfig, x: torch.Tensor, weight: ScaledWeight | BlockScaledWeight, *,
    bias: torch.Tensor | None = None, silu: bool = False, stream: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A product by one of the kernels."""
    block = weight.block if isinstance(weight, BlockScaledWeight) else None
    static = weight.input_scale if isinstance(weight, ScaledWeight) else None
    if config.kernel == "vector":
        quantized = block is not None or weight.inputs != "none"  # type: ignore[union-attr]
        whole = VectorGemm(x, weight.codes, weight.scale, quantized, static, bias, silu=silu, block=block)
        return launched(vector_launch(whole, config))
    coded = quantize(x, weight.codes.dtype, static, block[1] if block else 0)
    gemm = CodedGemm(coded, weight.codes, weight.scale, HALF, bias, silu, stream, block)
    return launched((tile_launch if config.kernel == "tile" else large_launch)(gemm, config))


def rows_of(config: GemmConfig) -> tuple[int, ...]:
    return (1, 3) if config.kernel == "vector" else (1, 70) if config.kernel == "large" else (17,)


def assert_close(out: torch.Tensor, expected: torch.Tensor, exact: bool) -> None:
    """Equal up to the final rounding (sums of integers are exact), or to that of FP8 sums in float32."""
    assert out.shape == expected.shape and out.dtype == expected.dtype
    assert torch.isfinite(out).all()
    limit = torch.finfo(HALF).eps * expected.float().abs() + (0 if exact else 2e-3 * expected.float().abs().max())
    assert ((out.float() - expected.float()).abs() <= limit + 1e-7).all()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("code", [FP8, INT8])
def test_products_are_those_of_the_reference(config: GemmConfig, code: torch.dtype) -> None:
    for rows in rows_of(config):
        x, weight = awkward_rows(rows), random_weight(code)
        bias = random(N).to(HALF) if rows % 2 else None
        out = product(config, x, weight, bias=bias)
        assert_close(out, weight.linear(x, bias), exact=code is INT8)


def gated(weight: ScaledWeight | BlockScaledWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The gated product in float32, rounded once."""
    wide = ScaledWeight(weight.codes, weight.scale, torch.float32) if isinstance(weight, ScaledWeight) else weight
    return TorchOps().silu_mul(wide.linear(x.float(), bias)).to(HALF)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("code", [FP8, INT8])
def test_the_gate_is_fused(config: GemmConfig, code: torch.dtype) -> None:
    x, weight, bias = random(2, K).to(HALF), random_weight(code, 2 * N), random(2 * N).to(HALF)
    out = product(config, x, weight, bias=bias, silu=True)
    assert_close(out, gated(weight, x, bias), exact=False)


@pytest.mark.parametrize("config", CONFIGS[2:])
def test_a_product_is_added_to_the_stream(config: GemmConfig) -> None:
    x, weight, stream = awkward_rows(17), random_weight(INT8), random(17, N).to(HALF)
    before = stream.clone()
    assert product(config, x, weight, stream=stream) is stream
    wide = ScaledWeight(weight.codes, weight.scale, torch.float32).linear(x.float())
    assert_close(stream, (wide + before.float()).to(HALF), exact=True)


def test_sums_of_codes_at_the_ends_of_their_range_are_exact() -> None:
    """int32 sums of the largest products, which float32 could not add one by one."""
    codes = torch.full((16, 2080), -128, dtype=INT8, device=DEVICE)
    weight = ScaledWeight(codes, torch.full((16,), 1e-3, device=DEVICE), HALF)
    codes[:, ::7] = 127
    x = torch.full((2, 2080), 1.0, device=DEVICE).to(HALF)
    x[1, ::3] = -1
    for config in (CONFIGS[0], CONFIGS[2], CONFIGS[5]):
        assert_close(product(config.values[0], x, weight), weight.linear(x), exact=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [FP8, INT8])
def test_a_static_scale_is_used_for_every_row(code: torch.dtype) -> None:
    x, weight = awkward_rows(3), random_weight(code, inputs="tensor")
    for config in (CONFIGS[0], CONFIGS[2]):
        assert_close(product(config.values[0], x, weight), weight.linear(x), exact=code is INT8)  # type: ignore[arg-type]


def random_blocks(n: int, k: int, rows: int = 128) -> BlockScaledWeight:
    scale = (torch.rand(-(-n // rows), -(-k // 128), device=DEVICE) + 0.5) / (100 * k**0.5)
    return BlockScaledWeight(random_codes(FP8, n, k), scale, HALF, (rows, 128))


BLOCK_CONFIGS = [
    pytest.param(GemmConfig("vector", 4, warps=1), id="vector"),
    pytest.param(GemmConfig("tile", WIDE, 16, 128, 4, 3, split=2), id="tile-split"),
    pytest.param(GemmConfig("tile", WIDE, 32, 128, 4, 3, tma=True), id="tile"),
    pytest.param(GemmConfig("large", 2 * WIDE, 16 if not ON_GPU else 128, 128, 8, 3, programs=1), id="large"),
]


@pytest.mark.parametrize("config", BLOCK_CONFIGS)
@pytest.mark.parametrize("silu", [False, True])
def test_blocks_have_scales_of_their_own(config: GemmConfig, silu: bool) -> None:
    """The last block of rows and that of columns are smaller; a gated weight's up rows begin inside a block."""
    weight = random_blocks(160, 304, 16 if silu else 128)
    for rows in (1, 3) if config.kernel == "vector" else (1, 17):
        x = random(rows, 304).to(HALF)
        expected = gated(weight, x) if silu else weight.linear(x)
        assert_close(product(config, x, weight, silu=silu), expected, exact=False)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "int8", "block"])
def test_rows_that_another_kernel_quantized_give_the_same_bits(kind: str, silu: bool) -> None:
    if kind == "block":
        weight: ScaledWeight | BlockScaledWeight = random_blocks(160 if ON_GPU else 24, 304, 16)
    else:
        weight = random_weight(FP8 if kind == "fp8" else INT8, 2 * N if ON_GPU else 24)
    block = weight.block if isinstance(weight, BlockScaledWeight) else None
    bias = random(weight.shape[0]).to(HALF)
    for rows in (1, 3) if ON_GPU else (3,):  # the interpreter is slow
        x = awkward_rows(rows, weight.shape[1])
        whole = VectorGemm(x, weight.codes, weight.scale, bias=bias, silu=silu, block=block)
        found = quantize(x, weight.codes.dtype, None, 128 if block else 0)
        coded = replace(whole, x=found.codes, x_scale=found.scale, dtype=HALF)
        for config in (GemmConfig("vector", 4, warps=1), GemmConfig("vector", 4, warps=1, programs=1))[not ON_GPU :]:
            assert torch.equal(launched(vector_launch(coded, config)), launched(vector_launch(whole, config)))


@pytest.mark.parametrize("size", [0, 1 << 40])
@pytest.mark.parametrize("gate", [False, True])
def test_one_row_is_quantized_apart_or_by_every_program(gate: bool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "USE_OWN_GEMMS", True)
    monkeypatch.setattr(scaled, "QUANTIZED_APART_SIZE", size)
    products, weight = scaled.ScaledProducts(TritonOps(), batch_invariant=False), random_weight(INT8, 24)
    x, carried, gain = random(1, K).to(HALF), random(1, K).to(HALF), random(K).to(HALF)
    total = x + carried
    out, stream = products.norm_linear(x, carried, gain, EPS, weight, None, gate)
    assert torch.equal(stream, total)
    normed = TorchOps().rms_norm(total, gain, EPS)
    expected = gated(weight, normed) if gate else weight.linear(normed)
    # A normed value that is rounded the other way moves a code by one, of 127.
    assert (out.float() - expected.float()).norm() < 0.02 * expected.float().norm()
