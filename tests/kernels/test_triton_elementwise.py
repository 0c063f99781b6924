"""Triton's row-wise kernels against the same formulas in plain torch, on fresh random inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from quire.kernels.reference import TorchOps
from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

# isort: split
from quire.kernels.triton.elementwise import MASK_BLOCK, SILU_BLOCK, add_rms_norm, mask_logits, rms_norm, silu_mul
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.qkv import prepare_qkv

REFERENCE = TorchOps()
OPS = TritonOps()
DTYPES = [torch.float32, HALF]
ROWS = [1, 5, 4097] if ON_GPU else [1, 5]
WIDTHS = [1, 33, 576, 1024, 5120, 16384] + ([4096, 7168, 32768] if ON_GPU else [])


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """Fresh memory is full of NaN: values a kernel does not write are noticed."""
    torch.use_deterministic_algorithms(True)  # which makes torch fill it
    yield
    torch.use_deterministic_algorithms(False)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Each value within one rounding of the largest beside it (a rotation mixes them), and on average far closer."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    single = actual.dtype == torch.float32
    step = 4e-6 if single else torch.finfo(actual.dtype).eps
    actual, expected = actual.double(), expected.double()
    difference = (actual - expected).abs()
    assert (difference <= step * expected.abs().amax(-1, keepdim=True)).all()
    # A missing or extra rounding is a fifth of a step. Among few values, one may round the other way.
    whole = step / (4 if single else 16) * expected.norm()
    assert difference.norm() <= math.hypot(whole, step * expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    weight = random(width, dtype=dtype)
    for rows in ROWS:
        x = random(rows, width, dtype=dtype)
        assert_near(rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
        tiny = x * 1e-3
        assert_near(rms_norm(tiny, weight, 1e-5), REFERENCE.rms_norm(tiny, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_writes_the_sum_over_the_residual(width: int, dtype: torch.dtype) -> None:
    weight = random(width, dtype=dtype)
    for rows in ROWS:
        x, residual = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype)
        expected, total = REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-6)
        out, stream = add_rms_norm(x, residual, weight, 1e-6)
        assert stream is residual
        assert torch.equal(residual, total), "the stream is rounded once, exactly as torch rounds it"
        assert_near(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "width", [1, 11, 48, 1536, SILU_BLOCK, SILU_BLOCK + 16, 3072] + ([14336, 28672] if ON_GPU else [])
)
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    for rows in ROWS:
        gate_up = 4 * random(rows, 2 * width, dtype=dtype)
        assert_near(silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


def test_silu_mul_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([-1e4, -100.0, -90.0, 0.0, 90.0, 1e4, float("nan")], device=DEVICE)
    out = silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start, width", [(0, 64), (3, 64), (16, 96)])
def test_rows_may_be_slices_of_a_wider_tensor(start: int, width: int, dtype: torch.dtype) -> None:
    x, residual, wide = (random(5, 200, dtype=dtype)[:, start : start + width] for _ in range(3))
    weight = random(width, dtype=dtype)
    assert_near(OPS.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    assert_near(OPS.silu_mul(x), REFERENCE.silu_mul(x))
    wide.copy_(residual)
    expected, total = REFERENCE.add_rms_norm(x, residual.contiguous(), weight, 1e-6)
    out, stream = OPS.add_rms_norm(x, wide, weight, 1e-6)
    assert_near(out, expected)
    assert torch.equal(stream, total)


class Projected:
    """The qkv of some tokens, and a cache they are written to: one layer of a block-major pool full of NaN."""

    def __init__(
        self,
        tokens: int,
        heads: int,
        kv_heads: int,
        dim: int,
        rotary: int,
        normed: bool,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        block_size: int = 8,
        blocks: int = 4,
    ) -> None:
        blocks += tokens // block_size
        self.shape = (heads, kv_heads, dim)
        self.qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        self.positions = torch.randint(0, 500, (tokens,), device=DEVICE)
        angles = torch.rand(500, rotary // 2, device=DEVICE) * 6.3
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) if rotary else None
        self.norms = (random(dim, dtype=dtype), random(dim, dtype=dtype), 1e-6) if normed else None
        self.pool = torch.full(
            (blocks, 3, 2, kv_heads, block_size, dim), torch.nan, dtype=kv_dtype or dtype, device=DEVICE
        )
        # Block 0 is kept for padding: no real token is written there.
        self.slots = block_size + torch.randperm((blocks - 1) * block_size, device=DEVICE)[:tokens]

    def check(self) -> None:
        expected_pool = self.pool.clone()
        given = self.qkv.clone()
        rest = (self.positions, self.cos_sin, self.norms)
        expected = REFERENCE.prepare_qkv(given, *rest, expected_pool[:, 1], self.slots, *self.shape)
        q = prepare_qkv(self.qkv, *rest, self.pool[:, 1], self.slots, *self.shape)
        assert_near(q, expected)
        assert torch.equal(self.pool.isnan(), expected_pool.isnan()), "the tokens' slots of this layer, no others"
        block, offset = self.slots // self.pool.shape[4], self.slots % self.pool.shape[4]
        assert_near(self.pool[block, 1, 0, :, offset], expected_pool[block, 1, 0, :, offset])
        assert torch.equal(self.pool[block, 1, 1, :, offset], expected_pool[block, 1, 1, :, offset])


MODELS = [
    (9, 3, 64, 64),  # SmolLM2
    (12, 12, 64, 0),  # GPT-2: no rotation
    (4, 4, 64, 16),  # GPT-NeoX: a quarter is rotated
    (3, 1, 80, 20),  # a partial rotation whose size is not a power of two
    (6, 2, 96, 96),
    (4, 1, 128, 128),
    (2, 1, 192, 192),
    (2, 1, 256, 256),
    (5, 5, 20, 10),
] + ([(32, 8, 128, 128), (16, 8, 128, 128), (64, 8, 128, 128), (32, 32, 80, 32)] if ON_GPU else [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads, kv_heads, dim, rotary", MODELS)
def test_prepare_qkv(heads: int, kv_heads: int, dim: int, rotary: int, normed: bool, dtype: torch.dtype) -> None:
    for tokens in [1, 5, 1000] if ON_GPU else [1, 5]:
        Projected(tokens, heads, kv_heads, dim, rotary, normed, dtype).check()


def test_the_cache_may_have_another_dtype() -> None:
    Projected(5, 4, 2, 64, 64, True, torch.float32, kv_dtype=HALF).check()
    Projected(5, 4, 2, 64, 32, False, torch.float32, kv_dtype=HALF).check()


@pytest.mark.parametrize("block_size", [1, 16, 24, 64])
def test_any_block_size(block_size: int) -> None:
    Projected(5, 4, 2, 64, 64, False, HALF, block_size=block_size, blocks=7).check()


def test_padding_tokens_write_to_block_zero_only() -> None:
    """A padded batch: the last tokens share slots of the null block."""
    case = Projected(7, 4, 2, 64, 64, True, HALF)
    case.slots[3:] = torch.tensor([0, 1, 7, 0], device=DEVICE)
    case.qkv[3:] = case.qkv[3]
    case.positions[3:] = 0
    case.check()


def test_qkv_may_be_a_slice_of_a_wider_tensor_and_q_is_written_over_it() -> None:
    case = Projected(5, 4, 2, 64, 64, True, HALF)
    wide = random(5, 1000, dtype=HALF)
    before = wide.clone()
    wide[:, 40 : 40 + case.qkv.shape[1]] = case.qkv
    case.qkv = wide[:, 40 : 40 + case.qkv.shape[1]]
    case.check()
    assert torch.equal(wide[:, :40], before[:, :40])
    assert torch.equal(wide[:, 40 + case.qkv.shape[1] :], before[:, 40 + case.qkv.shape[1] :])
    q = prepare_qkv(case.qkv, case.positions, None, None, case.pool[:, 1], case.slots, *case.shape)
    assert q.data_ptr() == case.qkv.data_ptr() and q.stride() == (1000, 64, 1)


@pytest.mark.skipif(not ON_GPU, reason="8 GiB of cache")
def test_a_cache_of_more_than_two_to_the_31_values() -> None:
    blocks, block_size, kv_heads, dim = 2**20 + 64, 16, 1, 128
    kv = torch.zeros(blocks, 2, kv_heads, block_size, dim, dtype=HALF, device=DEVICE)
    slots = torch.tensor([blocks * block_size - 1, 2**19 * block_size, 5], device=DEVICE)
    qkv = random(3, 3 * dim, dtype=HALF)
    values = qkv[:, 2 * dim :].clone()
    prepare_qkv(qkv, torch.zeros_like(slots), None, None, kv, slots, 1, 1, dim)
    assert torch.equal(kv[slots // block_size, 1, 0, slots % block_size], values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    x, weight = random(9, 320, dtype=dtype), random(320, dtype=dtype)
    assert torch.equal(OPS.rms_norm(x[3:4], weight, 1e-6), OPS.rms_norm(x, weight, 1e-6)[3:4])
    assert torch.equal(OPS.silu_mul(x[3:4]), OPS.silu_mul(x)[3:4])


def test_no_rows_launch_nothing() -> None:
    none, weight = random(0, 64, dtype=HALF), random(64, dtype=HALF)
    assert OPS.rms_norm(none, weight, 1e-6).shape == (0, 64)
    out, stream = OPS.add_rms_norm(none, none, weight, 1e-6)
    assert out.shape == (0, 64) and stream is none
    assert OPS.silu_mul(none).shape == (0, 32)
    kv = random(2, 2, 1, 8, 16, dtype=HALF)
    before = kv.clone()
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert OPS.prepare_qkv(none, nothing, None, None, kv, nothing, 2, 1, 16).shape == (0, 2, 16)
    assert torch.equal(kv, before)


def test_unsupported_layouts_go_to_torch() -> None:
    """Columns that are not contiguous, more dimensions than two, rows too wide for one program."""
    weight = random(64)
    for x in (random(64, 5).T, random(3, 2, 64)):
        assert_near(OPS.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
        assert_near(OPS.silu_mul(x), REFERENCE.silu_mul(x))
        expected, total = REFERENCE.add_rms_norm(x, x.clone(), weight, 1e-6)
        out, stream = OPS.add_rms_norm(x, x.clone(), weight, 1e-6)
        assert_near(out, expected)
        assert torch.equal(stream, total)
    wide, scale = random(2, 40000), random(40000)
    assert_near(OPS.rms_norm(wide, scale, 1e-6), REFERENCE.rms_norm(wide, scale, 1e-6))
    case = Projected(5, 4, 2, 64, 64, False, torch.float32)
    apart = case.pool.transpose(-1, -2).contiguous().transpose(-1, -2)
    expected_pool = case.pool.clone()
    rest = (case.positions, case.cos_sin, None)
    expected = REFERENCE.prepare_qkv(case.qkv, *rest, expected_pool[:, 1], case.slots, *case.shape)
    assert_near(OPS.prepare_qkv(case.qkv, *rest, apart[:, 1], case.slots, *case.shape), expected)
    torch.testing.assert_close(apart, expected_pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("vocab", [1, 31, 128, MASK_BLOCK + 33])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_mask_logits_writes_banned_tokens_only(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab + 3, generator=generator).to(DEVICE, dtype)[:, :vocab]
    allowed = torch.rand(3, vocab, generator=generator) < 0.4
    words = -(-vocab // 32)
    padded = torch.nn.functional.pad(allowed, (0, 32 * words - vocab)).view(3, words, 32).long()
    bits = (padded << torch.arange(32)).sum(-1)
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(DEVICE, torch.int32)
    rows = torch.tensor([4, 0, 3], dtype=torch.int32, device=DEVICE)
    expected = logits.clone()
    for row, mask in zip(rows.tolist(), allowed, strict=True):
        expected[row, ~mask.to(DEVICE)] = float("-inf")
    mask_logits(logits, rows, bits)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_mask_logits_of_no_rows() -> None:
    logits = torch.zeros(2, 40, device=DEVICE)
    nothing = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    mask_logits(logits, nothing, nothing.view(0, 1).expand(0, 2))
    assert not logits.any()
