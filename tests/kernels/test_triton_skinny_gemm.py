"""Skinny GEMMs in Triton, with everything that can be fused into them, against the unfused kernels in plain torch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

from quire.kernels.reference import TorchOps  # isort: skip
from quire.kernels.triton.skinny_gemm.gemm import GemmConfig, skinny_linear, skinny_norm_linear, skinny_silu_linear  # isort: skip
from quire.kernels.triton.skinny_gemm.candidates import GemmShape, candidates  # isort: skip
from quire.kernels.triton.skinny_gemm.common import Gemm  # isort: skip
from quire.kernels.triton.tuning_table import current_gpu  # isort: skip

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

FOLDS = [
    pytest.param(norm, residual, silu, bias, id="-".join(name for name, on in names if on) or "plain")
    for norm, residual, silu, bias in itertools.product((False, True), repeat=4)
    if norm or not residual
    for names in [[("norm", norm), ("residual", residual), ("silu", silu), ("bias", bias)]]
]

# Small enough for the interpreter: 40 outputs and 96 inputs are not multiples of any block.
VECTOR = GemmConfig("vector", 4, warps=2)
DIRECT = GemmConfig("direct", 16, block_m=8, warps=1, stages=2)
DOT = GemmConfig("dot", 16, block_m=32, block_k=32, warps=2, stages=2)
TILE = GemmConfig("tile", 64 if ON_GPU else 16, block_m=32, block_k=64 if ON_GPU else 32, warps=4, stages=3)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN before a kernel writes them."""
    new_output, empty_like = Gemm.new_output, torch.empty_like
    monkeypatch.setattr(Gemm, "new_output", lambda self: new_output(self).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: empty_like(x, **options).fill_(float("nan")))


def check(
    config: GemmConfig, rows: int, dtype: torch.dtype, norm: bool, residual: bool, silu: bool, bias: bool,
    n: int = 40, k: int = 96,
) -> torch.Tensor:  # fmt: skip
    """Compare a product with the reference; returns it."""
    x, gain = random(rows, k).to(dtype), random(k).to(dtype)
    weight = (random(n, k) * k**-0.5).to(dtype)
    carried = random(rows, k).to(dtype) if residual else None
    offset = random(n).to(dtype) if bias else None
    before = None if carried is None else carried.clone()
    if norm:
        out, stream = skinny_norm_linear(x, carried, gain, EPS, weight, offset, silu=silu, config=config)
        total = x if carried is None else x + carried
        assert torch.equal(stream, total)
        assert carried is None or torch.equal(carried, before)
        inputs = TorchOps().rms_norm(total.float(), gain.float(), EPS)
    else:
        fold = skinny_silu_linear if silu else skinny_linear
        out = fold(x, weight, offset, config=config)
        inputs = x.float()
    expected = inputs.double() @ weight.double().T
    if offset is not None:
        expected += offset.double()
    if silu:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    assert out.shape == expected.shape
    assert out.dtype == dtype
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], f"{config}: {error:.1e}"
    return out


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, device=DEVICE)


@pytest.mark.parametrize("norm, residual, silu, bias", FOLDS)
@pytest.mark.parametrize("config", [VECTOR, DOT, TILE], ids=lambda config: config.kernel)
def test_anything_can_be_fused(config: GemmConfig, norm: bool, residual: bool, silu: bool, bias: bool) -> None:
    check(config, 3, HALF, norm, residual, silu, bias)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize(
    "config, rows",
    [
        *((VECTOR, rows) for rows in (1, 2, 4)),
        (replace(VECTOR, warps=1, block_n=1), 1),
        (replace(VECTOR, warps=4, block_n=16), 2),
        *((DOT, rows) for rows in (1, 5, 16, 20)),
        (replace(DOT, block_n=8, warps=4, block_m=16), 5),
        *((TILE, rows) for rows in (1, 5, 16, 20, 40)),
    ],
    ids=lambda value: value.kernel if isinstance(value, GemmConfig) else str(value),
)
def test_any_number_of_rows(config: GemmConfig, rows: int, dtype: torch.dtype) -> None:
    check(config, rows, dtype, norm=True, residual=True, silu=False, bias=False)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 8, 11])
def test_weights_go_directly_into_operands(rows: int, silu: bool) -> None:
    """Of many chunks, of a few, of part of one; with a program for each tile, and with one for all."""
    for warps, stages, k, programs in ((1, 2, 320, 0), (2, 3, 200, 0), (4, 4, 512, 0), (1, 2, 320, 1), (2, 4, 200, 1)):
        config = GemmConfig("direct", 16, 8 if rows <= 8 else 16, warps=warps, stages=stages, programs=programs)
        check(config, rows, HALF, False, False, silu, bias=programs > 0, n=72, k=k)


@pytest.mark.parametrize("silu", [False, True])
def test_few_programs_loop_over_many_outputs(silu: bool) -> None:
    for rows in (1, 3):
        check(replace(VECTOR, block_n=2, programs=1), rows, HALF, True, True, silu, True)


@pytest.mark.skipif(not ON_GPU, reason="when the next kernel starts is the card's business")
def test_the_next_kernel_may_start_early() -> None:
    for config in (VECTOR, DIRECT):
        norm = config is VECTOR
        check(replace(config, early=True), 1, HALF, norm, norm, True, True)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("shared", [{}, {"split": 2}, {"split": 3}, {"programs": 1}], ids=str)
def test_programs_share_tiles(shared: dict[str, int], tma: bool, silu: bool, dtype: torch.dtype) -> None:
    config = replace(TILE, tma=tma, **shared)
    k = 320 if ON_GPU else 160
    for rows in (20, 40):
        check(config, rows, dtype, False, False, silu, True, k=k)


def test_shared_tiles_give_the_same_result_each_time() -> None:
    x, weight = random(20, 160).to(HALF), random(40, 160).to(HALF)
    for config in (replace(TILE, split=3), replace(TILE, programs=1)):
        first = skinny_linear(x, weight, config=config)
        for _ in range(20 if ON_GPU else 2):
            assert torch.equal(skinny_linear(x, weight, config=config), first)


def test_a_norm_needs_whole_tiles() -> None:
    x, weight = random(4, 96).to(HALF), random(40, 96).to(HALF)
    with pytest.raises(ValueError, match="whole tiles"):
        skinny_norm_linear(x, None, x[0], EPS, weight, config=replace(TILE, split=2))


def test_a_norm_is_not_fused_with_direct_loads() -> None:
    x, weight = random(4, 96).to(HALF), random(40, 96).to(HALF)
    with pytest.raises(ValueError, match="does not fuse a norm"):
        skinny_norm_linear(x, None, x[0], EPS, weight, config=DIRECT)


def test_too_many_rows_are_refused() -> None:
    x, weight = random(40, 96).to(HALF), random(40, 96).to(HALF)
    for config in (VECTOR, DIRECT, DOT):
        with pytest.raises(ValueError, match="not 40"):
            skinny_linear(x, weight, config=config)


@pytest.mark.skipif(not ON_GPU, reason="as many programs as a card takes")
@pytest.mark.parametrize("rows", [1, 3, 5, 20, 64, 200])
@pytest.mark.parametrize(
    "shape",
    [GemmShape("norm_linear", 4096, 1024), GemmShape("silu_linear", 3072, 576), GemmShape("linear", 4096, 14336)],
    ids=str,
)
def test_the_likeliest_candidates(shape: GemmShape, rows: int) -> None:
    """benchmarks/gpu/skinny_gemm.py checks all of them."""
    bucket = 1 << (rows - 1).bit_length()
    found = candidates(shape, bucket, HALF, current_gpu())
    for config in [*found[:3], *(config for config in found if config.kernel == "direct")][:5]:
        check(config, rows, HALF, shape.norm, shape.norm, shape.silu, False, shape.n, shape.k)
