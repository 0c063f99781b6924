"""The reference kernels against the same formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from quire.kernels.reference import TorchOps
from tests.layers.device_watch import NeverWaits

OPS = TorchOps()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Within one rounding of our dtype (float32 sums may round a little more)."""
    assert exact.dtype == torch.float64
    step = 2e-6 if ours.dtype == torch.float32 else torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=step, atol=step)


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype) -> None:
    x, weight, bias = randn(5, 24, dtype=dtype), randn(7, 24, dtype=dtype, seed=1), randn(7, dtype=dtype, seed=2)
    close(OPS.linear(x, weight, bias), x.double() @ weight.double().T + bias.double())
    close(OPS.linear(x, weight), x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = randn(5, 33, dtype=dtype), randn(33, dtype=dtype, seed=1)
    close(OPS.rms_norm(x, weight, 1e-5), exact_rms_norm(x, weight, 1e-5))
    tiny = x * 1e-4
    close(OPS.rms_norm(tiny, weight, 1e-5), exact_rms_norm(tiny, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_writes_the_sum_over_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (randn(5, 33, dtype=dtype, seed=i) for i in range(3))
    weight = weight[0]
    expected = (x.double() + residual.double()).to(dtype)
    normed, stream = OPS.add_rms_norm(x, residual, weight, 1e-6)
    assert stream is residual
    torch.testing.assert_close(residual, expected)
    close(normed, exact_rms_norm(expected, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_takes_the_gate_first(dtype: torch.dtype) -> None:
    gate_up = 3 * randn(5, 22, dtype=dtype)
    gate, up = gate_up.double()[:, :11], gate_up.double()[:, 11:]
    close(OPS.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [None, 4, 6])
@pytest.mark.parametrize("normed", [False, True])
def test_prepare_qkv_normalizes_rotates_and_stores(dtype: torch.dtype, rotary_dim: int | None, normed: bool) -> None:
    tokens, heads, kv_heads, dim, block_size = 5, 4, 2, 6, 4
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.tensor([3, 0, 7, 8, 2])
    slots = torch.tensor([9, 4, 31, 0, 17])
    table = randn(10, rotary_dim, seed=4) if rotary_dim else None
    norms = (randn(dim, dtype=dtype, seed=5), randn(dim, dtype=dtype, seed=6), 1e-6) if normed else None
    pool = torch.full((8, 3, 2, kv_heads, block_size, dim), torch.nan, dtype=dtype)
    cache = pool[:, 1]  # one layer of a block-major pool

    exact = qkv.double().view(tokens, -1, dim)
    q, k, v = exact[:, :heads], exact[:, heads : heads + kv_heads], exact[:, heads + kv_heads :]
    if norms:
        # A kernel may round between norm and rotation or not; the float64 side does not.
        q, k = exact_rms_norm(q, norms[0], norms[2]), exact_rms_norm(k, norms[1], norms[2])
    if table is not None:
        q, k = turned(q, positions, table), turned(k, positions, table)

    with NeverWaits():
        ours = OPS.prepare_qkv(qkv.clone(), positions, table, norms, cache, slots, heads, kv_heads, dim)
    loose = 4 if dtype != torch.float32 else 1
    step = loose * (2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)
    torch.testing.assert_close(ours.double(), q, rtol=step, atol=step)
    for token, slot in enumerate(slots.tolist()):
        stored = cache[slot // block_size, :, :, slot % block_size]
        torch.testing.assert_close(stored[0].double(), k[token], rtol=step, atol=step)
        torch.testing.assert_close(stored[1].double(), v[token], rtol=0, atol=0)
    assert (~pool.isnan()).sum() == tokens * 2 * kv_heads * dim, "nothing else is written"


def turned(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Pair by pair, as complex numbers."""
    half = table.shape[1] // 2
    result = x.clone()
    for i in range(half):
        cos, sin = table[positions, i].double(), table[positions, half + i].double()
        turn = torch.complex(cos, sin).unsqueeze(1)
        pair = torch.complex(x[..., i], x[..., half + i]) * turn
        result[..., i], result[..., half + i] = pair.real, pair.imag
    return result


def test_nothing_waits_for_the_device() -> None:
    x, weight = randn(3, 8), randn(8)
    with NeverWaits():
        OPS.linear(x, randn(4, 8), randn(4))
        OPS.add_rms_norm(x, x.clone(), weight, 1e-6)
        OPS.silu_mul(x)


def test_the_rotation_of_position_one_by_90_degrees() -> None:
    """A case small enough to see: (1, 2) rotated by 90 degrees is (-2, 1)."""
    quarter = math.pi / 2
    table = torch.tensor([[1.0, 0.0], [math.cos(quarter), math.sin(quarter)]])
    kv = torch.zeros(1, 2, 1, 2, 2)
    qkv = torch.tensor([[1.0, 2.0, 1.0, 2.0, 5.0, 6.0]])
    q = OPS.prepare_qkv(qkv, torch.tensor([1]), table, None, kv, torch.tensor([1]), 1, 1, 2)
    torch.testing.assert_close(q, torch.tensor([[[-2.0, 1.0]]]))
    torch.testing.assert_close(kv[0, :, 0, 1], torch.tensor([[-2.0, 1.0], [5.0, 6.0]]))
