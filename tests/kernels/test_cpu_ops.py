"""Native CPU kernels against the same formulas in float64, on fresh random inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.kernels.cpu.ops import CpuOps

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    ops = CpuOps()
    if not ops.is_native:
        pytest.skip("no C++ compiler on this machine")
    return ops


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    """Within the rounding of the result's dtype, `scale` being the size of the summed terms."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}[actual.dtype]
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 17, 33, 48, 50, 64, 65, 131])
def test_linear_is_a_product_for_any_shape(ops: CpuOps, rows: int, dtype: torch.dtype) -> None:
    for width, depth in [(1, 1), (5, 3), (37, 65), (100, 576), (51, 1601), (24, 16), (576, 100)]:
        x, weight, bias = (
            random(rows, depth, dtype=dtype),
            random(width, depth, dtype=dtype),
            random(width, dtype=dtype),
        )
        product = x.double() @ weight.double().T
        assert_near(ops.linear(x, weight), product, depth**0.5)
        assert_near(ops.linear(x, weight, bias), product + bias.double(), depth**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width, depth", [(1100, 30, 50), (1, 40, 13001), (20, 40, 9001)])
def test_linear_in_several_slabs_and_chunks(ops: CpuOps, rows: int, width: int, depth: int, dtype: torch.dtype) -> None:
    """More rows than are packed at once, and a depth that is split."""
    x, weight = random(rows, depth, dtype=dtype), random(width, depth, dtype=dtype)
    assert_near(ops.linear(x, weight), x.double() @ weight.double().T, depth**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_takes_strided_rows(ops: CpuOps, dtype: torch.dtype) -> None:
    x, weight = random(9, 200, dtype=dtype)[:, 50:150], random(40, 300, dtype=dtype)[:, 7:107]
    assert_near(ops.linear(x, weight), x.double() @ weight.double().T, 10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gives_a_row_the_same_bits_in_every_batch(ops: CpuOps, dtype: torch.dtype) -> None:
    x, weight = random(200, 1000, dtype=dtype), random(101, 1000, dtype=dtype)
    whole = ops.linear(x, weight)
    for first, last in [(0, 1), (199, 200), (3, 11), (50, 66), (17, 50), (100, 164), (1, 130)]:
        assert torch.equal(ops.linear(x[first:last], weight), whole[first:last])


def test_linear_is_the_same_on_one_thread_and_many(ops: CpuOps) -> None:
    x, weight = random(20, 576), random(960, 576)
    whole = ops.linear(x, weight)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        assert torch.equal(ops.linear(x, weight), whole)
    finally:
        torch.set_num_threads(threads)


def test_linear_propagates_nan_and_infinity(ops: CpuOps) -> None:
    x, weight = random(3, 64), random(20, 64)
    x[1, 5], x[2, 6] = float("nan"), float("inf")
    out = ops.linear(x, weight)
    assert out[0].isfinite().all() and out[1].isnan().all() and out[2].isinf().all()
    assert ops.linear(x.bfloat16(), weight.bfloat16())[1].isnan().all()


def test_linear_of_no_rows_is_empty(ops: CpuOps) -> None:
    assert ops.linear(random(0, 64), random(20, 64)).shape == (0, 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 7), (5, 100), (200, 577)])
def test_norms(ops: CpuOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = random(*shape, dtype=dtype), random(*shape, dtype=dtype), random(shape[1], dtype=dtype)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert_near(ops.rms_norm(x, weight, 1e-5), norm(x))
    expected = (residual.double() + x.double()).to(dtype)
    out, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert total.data_ptr() == residual.data_ptr()
    assert_near(total, expected.double())
    assert_near(out, norm(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_of_the_stream_go_beside_each_other(ops: CpuOps, dtype: torch.dtype) -> None:
    """Into columns of a wider matrix; neither part of the stream is changed."""
    x, residual, out = (random(5, width, dtype=dtype) for width in (37, 37, 3 * 37))
    parts = (x.clone(), residual.clone(), out[:, 37:74].clone())
    ops.copy_stream(x, residual, out[:, :37])
    ops.copy_stream(None, residual, out[:, 74:])
    assert_near(out, torch.cat((parts[0].double() + parts[1].double(), parts[2], parts[1]), dim=-1))
    assert x.equal(parts[0]) and residual.equal(parts[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1536), (3, 7), (100, 501)])
def test_silu_mul(ops: CpuOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype) * 8
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(ops.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)


def test_silu_mul_at_the_ends_of_the_range(ops: CpuOps) -> None:
    gate = torch.tensor([-1e4, -100.0, -90.0, 0.0, 90.0, 1e4, float("nan")])
    out = ops.silu_mul(torch.cat((gate, torch.ones(7)))[None])[0]
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, dim, rotary", [(9, 3, 64, 64), (4, 4, 20, 10), (6, 1, 128, 64), (2, 1, 80, 0)]
)
@pytest.mark.parametrize("with_norms", [False, True])
def test_prepare_qkv(
    ops: CpuOps, heads: int, kv_heads: int, dim: int, rotary: int, with_norms: bool, dtype: torch.dtype
) -> None:
    tokens, blocks, block_size = 70, 12, 8
    qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.randint(0, 500, (tokens,))
    angle = positions[:, None].double() * 10000 ** -(torch.arange(rotary // 2).double() / max(rotary // 2, 1))
    table = torch.zeros(500, rotary)
    table[positions] = torch.cat((angle.cos(), angle.sin()), dim=-1).float()
    norms = (random(dim, dtype=dtype), random(dim, dtype=dtype), 1e-6) if with_norms else None
    # A layer's cache is a slice of blocks that hold every layer: block stride is larger than a block.
    kv = torch.zeros(blocks, 3, 2, kv_heads, block_size, dim, dtype=dtype)[:, 1]
    slots = torch.randperm(blocks * block_size)[:tokens]

    q, k, v = qkv.double().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if norms:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
            for x, w in ((q, norms[0]), (k, norms[1]))
        )
    half, cos, sin = rotary // 2, angle.cos()[:, None], angle.sin()[:, None]
    q, k = (
        torch.cat(
            (
                x[..., :half] * cos - x[..., half:rotary] * sin,
                x[..., half:rotary] * cos + x[..., :half] * sin,
                x[..., rotary:],
            ),
            -1,
        )
        for x in (q, k)
    )

    out = ops.prepare_qkv(qkv, positions, table if rotary else None, norms, kv, slots, heads, kv_heads, dim)
    assert_near(out, q, 3)
    written = kv[slots // block_size, :, :, slots % block_size]
    assert_near(written[:, 0], k, 3)
    assert_near(written[:, 1], v)
    kv[slots // block_size, :, :, slots % block_size] = 0
    assert not kv.any(), "a slot of no token was written"


def test_float16_goes_to_torch(ops: CpuOps) -> None:
    x, weight = random(3, 64, dtype=torch.float16), random(20, 64, dtype=torch.float16)
    assert ops.linear(x, weight).dtype == torch.float16


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_without_a_compiler_torch_is_used_and_one_warning_logged(compiler: str, tmp_path: os.PathLike[str]) -> None:
    script = """
import logging, torch
logging.basicConfig(format="%(levelname)s %(message)s")
from quire.kernels.cpu.ops import CpuOps
from quire.layers.attention.cpu import CpuPagedAttention
x, weight = torch.randn(3, 64), torch.randn(20, 64)
ops, attention = CpuOps(), CpuPagedAttention()
assert not ops.is_native and not attention.is_native
assert torch.equal(ops.linear(x, weight), torch.nn.functional.linear(x, weight))
assert ops.silu_mul(x).shape == (3, 32)
"""
    environment = {**os.environ, "CXX": compiler, "QUIRE_CACHE": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("WARNING") == 1 and "native CPU kernels are off" in run.stderr


GENERATE = """
import sys
from quire import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=32) as llm:
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_generating_imports_no_compiler(tiny_model: Path) -> None:
    """Torch would import its compiler within the first decode step, which takes seconds."""
    ran = subprocess.run([sys.executable, "-c", GENERATE, str(tiny_model)], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1:] == ["[]"], ran.stderr
