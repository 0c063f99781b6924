"""Products with packed weights on a CPU: GGUF's blocks, INT4, INT8 and ternary; activations in 8 bits, sums exact."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quire.kernels.cpu import build
from quire.kernels.cpu.ops import CpuOps
from quire.kernels.weights.base import SplitWeight
from quire.kernels.weights.interleaved import InterleavedWeight
from quire.kernels.weights.strips import KINDS as STRIPS
from quire.kernels.weights.strips import MIDDLE, StripWeight
from quire.kernels.weights.superblock import KINDS
from quire.platforms.cpu import cpu_flags
from tests.kernels.gguf_blocks import HALVES, random_blocks


def interleaved(name: str, raw: np.ndarray, width: int, dtype: torch.dtype = torch.float32) -> InterleavedWeight:
    shape = (len(raw), width)
    weight = InterleavedWeight.allocate(shape, dtype, lambda size, kind: torch.zeros(size, dtype=kind), KINDS[name])
    weight.write(slice(0, len(raw)), torch.from_numpy(raw))
    return weight


def random_weight(name: str, rows: int, width: int) -> tuple[InterleavedWeight, torch.Tensor]:
    """A weight, and its values in float64 by the gguf package."""
    raw = random_blocks(name, rows, width, seed=rows)
    return interleaved(name, raw, width), torch.from_numpy(gguf.dequantize(raw, Kind[name])).double()


def rounded(x: torch.Tensor, block: int) -> torch.Tensor:
    """x as the product sees it, in float64: 8 bits by blocks."""
    blocks = x.float().unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1, keepdim=True)
    bound = torch.full_like(largest, 127)  # a tensor: torch divides a number in two roundings
    codes = (blocks * (bound / largest)).round()
    return (codes.double() * (largest / bound).double()).flatten(-2)


LEVELS = {"x86-64-v4": "avx512vl", "x86-64-v3": "avx2", "x86-64": "sse2"}
"""Architectures below this machine's own (AVX-512 without VNNI, AVX2, neither), and what a machine needs for them."""


@pytest.fixture(scope="module", params=["native", *LEVELS])
def ops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuOps:
    """The kernels for this machine, and for less than it has."""
    ops, level = CpuOps(), request.param
    if not ops.is_native:
        pytest.skip("no C++ compiler on this machine")
    if level == "native":
        return ops
    compiler = build._compiler()
    if LEVELS[level] not in cpu_flags() or any(argument.startswith("-march=") for argument in compiler):
        pytest.skip(f"this machine does not run {level}, or CXX names an architecture")
    # Hardly optimized, which compiles in a fraction of the time: what differs is written out in intrinsics.
    flags = [flag for flag in build.FLAGS if flag != "-O3"]
    library = tmp_path_factory.mktemp(level) / "packed.so"
    sources = [str(Path(build.__file__).with_name(name)) for name in ("packed.cpp", "pool.cpp", "strips.cpp")]
    subprocess.run([*compiler, *flags, "-O1", f"-march={level}", "-w", "-shared", *sources, "-o", library], check=True)
    native = build.Library(library)
    ops._packed_linear, ops._packed_embedding = native.kernel("packed_linear"), native.kernel("packed_embedding")
    return ops


@pytest.mark.parametrize("name", KINDS)
def test_values_are_the_packages_bit_by_bit(ops: CpuOps, name: str) -> None:
    """Written in parts that begin and end inside a strip; looked up by the kernel and without it."""
    raw = random_blocks(name, 50, 512)
    expected = torch.from_numpy(gguf.dequantize(raw, Kind[name]))
    weight = interleaved(name, raw, 512)
    parts = interleaved(name, raw, 512)
    for tensor in parts.tensors.values():
        tensor.zero_()
    for first, last in ((0, 7), (7, 33), (33, 50)):
        parts.write(slice(first, last), torch.from_numpy(raw[first:last]))
    tokens = torch.tensor([49, 0, 16, 15, 0])
    assert torch.equal(weight.dequantize(), expected) and torch.equal(parts.dequantize(), expected)
    assert torch.equal(weight.embedding(tokens), expected[tokens])
    assert torch.equal(ops.embedding(tokens, weight), expected[tokens])
    narrow = interleaved(name, raw, 512, torch.bfloat16)
    assert torch.equal(ops.embedding(tokens, narrow), expected[tokens].bfloat16())


@pytest.mark.parametrize("name", KINDS)
def test_memory_is_the_files(name: str) -> None:
    weight, _ = random_weight(name, 32, 512)
    assert weight.nbytes <= 1.04 * 32 * KINDS[name].row_bytes(512)


def exact_case(name: str, extreme: bool) -> tuple[torch.Tensor, InterleavedWeight, np.ndarray]:
    """One block of inputs and weights whose scales are all 1: results are integers (x, weight, what they are)."""
    kind = KINDS[name]
    rng = np.random.default_rng(len(name))
    raw = random_blocks(name, 40, kind.block, seed=3)
    if extreme:  # the largest sums: 16 bits would saturate
        raw[:20], raw[20:] = 255, 0
    for at in HALVES[name]:
        raw[:, at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    x = rng.integers(-127, 128, (5, kind.block))
    if extreme:
        x[1:3] = [[127], [-127]]
    x[:, 0] = 127
    values = gguf.dequantize(raw, Kind[name]).astype(np.int64)
    weight = interleaved(name, raw, kind.block)
    return torch.from_numpy(x).float(), weight, x @ values.T


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_sums_of_a_block_are_exact(ops: CpuOps, name: str, extreme: bool) -> None:
    x, weight, expected = exact_case(name, extreme)
    found = ops.linear(x, weight).double().numpy()
    # Integers above 2^24 are rounded once when they become float32; a minimum is a second one.
    bound = 0 if np.abs(expected).max() < 2**24 else np.abs(expected).max() * 2.0**-23
    assert np.abs(found - expected).max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 37])
@pytest.mark.parametrize("name", KINDS)
def test_products_are_those_of_the_rounded_numbers(ops: CpuOps, name: str, rows: int, dtype: torch.dtype) -> None:
    """Within the rounding of float32, for any number of outputs; strided, with a bias."""
    for outputs in (1, 37):
        weight, values = random_weight(name, outputs, 768)
        weight.dtype = dtype
        x = (torch.randn(rows, 1000) * 3).to(dtype)[:, 100:868]
        bias = torch.randn(outputs).to(dtype)
        expected = rounded(x, KINDS[name].block) @ values.T + bias.double()
        size = (rounded(x, KINDS[name].block).abs() @ values.abs().T).max()
        found = ops.linear(x, weight, bias)
        assert found.dtype == dtype and found.shape == (rows, outputs)
        error = 2e-6 * size + (2.0**-8 * expected.abs() if dtype is torch.bfloat16 else 0)
        assert ((found.double() - expected).abs() <= error).all()
        plain = weight.linear(x).double()
        torch.testing.assert_close(ops.linear(x, weight).double(), plain, rtol=1e-2, atol=1e-5 * size)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_threads(ops: CpuOps, name: str) -> None:
    weight, _ = random_weight(name, 1000, 512)
    x = torch.randn(70, 512)
    whole = ops.linear(x, weight)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for first, last in ((0, 70), (0, 1), (69, 70), (3, 8), (30, 65)):
                assert torch.equal(ops.linear(x[first:last], weight), whole[first:last])
    finally:
        torch.set_num_threads(threads)


def test_fused_parts_of_several_kinds(ops: CpuOps) -> None:
    """As the query, key and value projections of a Q4_K_M file; strips do not cross parts."""
    parts = [random_weight(name, rows, 256)[0] for name, rows in (("Q4_K", 40), ("Q6_K", 9), ("Q8_0", 16))]
    x, bias = torch.randn(6, 256), torch.randn(65)
    found = ops.linear(x, SplitWeight(parts), bias)
    alone = torch.cat([ops.linear(x, part) for part in parts], -1) + bias
    assert torch.equal(found, alone)


def test_numbers_that_are_none_reach_the_result(ops: CpuOps) -> None:
    weight, _ = random_weight("Q4_1", 20, 64)
    x = torch.randn(5, 64)
    x[1, 40], x[2, 3], x[3], x[4] = torch.nan, torch.inf, 0, 1e-38
    out = ops.linear(x, weight)
    assert out[0].isfinite().all() and out[1].isnan().all() and out[2].isnan().all()
    assert (out[3:] == 0).all()


def strips(
    bits: int,
    zeros: bool,
    shape: tuple[int, int],
    group: int,
    block: int | None = None,
    order: torch.Tensor | None = None,
) -> tuple[StripWeight, torch.Tensor]:
    """A weight of random codes, and its values in float64."""
    rows, width = shape
    random = torch.Generator().manual_seed(rows * width + bits)
    weight = StripWeight.allocate(
        shape, torch.float32, lambda size, kind: torch.zeros(size, dtype=kind), bits, group, zeros, block,
        ordered=order is not None,
    )  # fmt: skip
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=random)
    scale = torch.randn(rows, width // group, generator=random)
    zero = torch.randint(0, 1 << bits, scale.shape, dtype=torch.uint8, generator=random) if zeros else None
    for first, last in ((0, rows // 2), (rows // 2, rows)):  # begins and ends inside a strip
        part = slice(first, last)
        weight.write(part, codes[part], scale[part], None if zero is None else zero[part])
    subtracted = torch.full(scale.shape, MIDDLE[bits]) if zero is None else zero.long()
    values = (codes - subtracted.repeat_interleave(group, 1)) * scale.double().repeat_interleave(group, 1)
    if order is not None:
        assert weight.order is not None
        weight.order.copy_(order)
        values[:, order] = values.clone()
    return weight, values


@pytest.mark.parametrize(("bits", "zeros"), STRIPS)
def test_integer_sums_of_a_whole_row_are_exact(ops: CpuOps, bits: int, zeros: bool) -> None:
    """The largest codes and numbers, one block of all inputs: the sums of plain integers, bit by bit."""
    width = 1024
    weight, _ = strips(bits, zeros, (40, width), width, width)
    codes = torch.randint(0, 1 << bits, (40, width), dtype=torch.uint8)
    codes[0], codes[1] = 0, (1 << bits) - 1
    zero = torch.randint(0, 1 << bits, (40, 1), dtype=torch.uint8)
    weight.write(slice(0, 40), codes, torch.ones(40, 1), zero if zeros else None)
    x = torch.randint(-127, 128, (11, width))
    x[1], x[2] = 127, -127
    x[:, 0] = 127
    expected = x @ (codes.long() - (zero.long() if zeros else MIDDLE[bits])).t()
    assert torch.equal(ops.linear(x.float(), weight), expected.float())


@pytest.mark.parametrize(("bits", "zeros"), STRIPS)
@pytest.mark.parametrize(("group", "block"), [(32, 32), (64, 64), (128, 128), (384, 384), (384, 128)])
def test_strips_give_the_products_of_the_rounded_numbers(
    ops: CpuOps, bits: int, zeros: bool, group: int, block: int
) -> None:
    weight, values = strips(bits, zeros, (37, 384), group, block)
    assert torch.equal(weight.dequantize(), values.float())
    for rows, dtype in ((1, torch.float32), (7, torch.bfloat16), (45, torch.float32)):
        x = (torch.randn(rows, 500) * 3).to(dtype)[:, 50:434]
        bias = torch.randn(37).to(dtype)
        near = rounded(x, block)
        expected, size = near @ values.T + bias.double(), (near.abs() @ values.abs().T).max()
        found = ops.linear(x, weight, bias)
        error = 2e-6 * size + (2.0**-8 * expected.abs() if dtype is torch.bfloat16 else 0)
        assert ((found.double() - expected).abs() <= error).all()
        for row in {0, rows // 2, rows - 1}:  # the same bits alone
            assert torch.equal(ops.linear(x[row : row + 1], weight, bias)[0], found[row])


def test_inputs_in_another_order(ops: CpuOps) -> None:
    """GPTQ's act-order: blocks are those of the stored order."""
    order = torch.randperm(256)
    weight, values = strips(4, True, (20, 256), 64, order=order)
    x = torch.randn(3, 256)
    expected = rounded(x[:, order], 64) @ values[:, order].T
    assert torch.equal(weight.dequantize(), values.float())
    torch.testing.assert_close(ops.linear(x, weight).double(), expected, rtol=1e-5, atol=1e-4)


def test_memory_of_strips_is_the_checkpoints() -> None:
    """Scales in float32 instead of 16 bits: 3 % more for groups of 128."""
    weight, _ = strips(4, False, (32, 1024), 128)
    assert weight.nbytes <= 1.04 * 32 * (1024 // 2 + 1024 // 128 * 2)
    assert strips(2, False, (32, 1024), 1024)[0].nbytes <= 1.02 * 32 * 1024 // 4


def stack(weights: list[InterleavedWeight] | list[StripWeight]) -> InterleavedWeight | StripWeight:
    first = weights[0]
    tensors = {name: torch.stack([weight.tensors[name] for weight in weights]) for name in first.tensors}
    return first.with_tensors(tensors, (len(weights), *first.shape))


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "int4"])
def test_packed_experts_are_the_sum_of_their_products(kind: str) -> None:
    """Gate and up one above the other, begun inside a strip; each row the same alone as among others."""
    ops = CpuOps()
    if not ops.is_native:
        pytest.skip("no C++ compiler on this machine")
    experts, hidden, width, top = 5, 256, 512, 2

    def make(rows: int, columns: int) -> Any:
        if kind == "int4":
            return stack([strips(4, True, (rows, columns), 128)[0] for _ in range(experts)])
        return stack([interleaved(kind, random_blocks(kind, rows, columns, seed=i), columns) for i in range(experts)])

    gate_up, down = make(2 * width, hidden), make(hidden, width)
    x = torch.randn(9, hidden)
    weights = torch.rand(9, top)
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(9)]).int()
    found = ops.experts(x, weights, chosen, gate_up, down)
    for row in range(9):
        total = torch.zeros(hidden)
        for share, expert in sorted(zip(weights[row], chosen[row].tolist(), strict=True), key=lambda pair: pair[1]):
            gate, up = gate_up[expert].linear(x[row : row + 1]).chunk(2, -1)
            total += share * down[expert].linear(torch.nn.functional.silu(gate) * up)[0]
        # A number on the edge between two codes may be rounded to either.
        assert (found[row] - total).norm() < 0.02 * total.norm()
        alone = ops.experts(x[row : row + 1], weights[row : row + 1], chosen[row : row + 1], gate_up, down)
        assert torch.equal(alone[0], found[row])
