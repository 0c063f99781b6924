"""Skinny GEMM `vector`: 1 to 4 rows on the float32 FMA units.

A program owns a few rows of the weight, holds all of them in registers, and multiplies them with every input row. A
thread loads 16 bytes of a weight row at a time; all its loads are in flight before the first is used, and they are
issued before `gdc_wait`, so they overlap the end of the preceding kernel. Tensor cores would idle here: float32 FMAs
keep pace with memory up to about 4 input rows.

Bytes: the weight once; the input, the residual and the gain once per program, mostly from cache. Operations: one
conversion per weight, and one multiply-add per weight and row.
"""

# ruff: noqa: N803, N806, RUF005  # Triton's names; its tuples grow by `+` alone
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.skinny_gemm.common import Gemm, GemmConfig, GemmLaunch

MAX_ROWS = 4
"""Input rows: with more, arithmetic takes longer than the loads."""


@triton.jit
def weight_rows(weight, first, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows [first, first + BLOCK_N) of a weight [N, K], as tiles [BLOCK_N, BLOCK_K]; past the end the last repeats."""
    rows = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    tiles = ()
    for chunk in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        columns = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        at = weight + rows[:, None] * K + columns[None, :]
        # A step reads each weight once: it should not evict what is read again.
        if (chunk + 1) * BLOCK_K <= K:
            tile = tl.load(at, eviction_policy="evict_first")
        else:
            tile = tl.load(at, mask=columns[None, :] < K, other=0.0, eviction_policy="evict_first")
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def _tiles(weight, first, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SILU: tl.constexpr):
    """The weight tiles of outputs [first, first + BLOCK_N); with SILU those of the gate, then those of up."""
    tiles = weight_rows(weight, first, N, K, BLOCK_N, BLOCK_K)
    if SILU:
        tiles = tiles + weight_rows(weight + N.to(tl.int64) * K, first, N, K, BLOCK_N, BLOCK_K)
    return tiles


@triton.jit
def load_chunks(vector, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A vector of K values in chunks of BLOCK_K, zeros past its end."""
    chunks = ()
    for chunk in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        columns = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        chunks = chunks + (tl.load(vector + columns, mask=columns < K, other=0.0),)
    return chunks


@triton.jit
def apply_gain(row, carried, gain, stream, writes, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(stream * gain in chunks, squares of the stream), where stream = row + carried, rounded to its dtype."""
    chunks = ()
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for chunk in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        columns = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        value = row[chunk]
        if carried is not None:
            value = (value.to(tl.float32) + carried[chunk].to(tl.float32)).to(value.dtype)
            tl.store(stream + columns, value, mask=(columns < K) & writes)
        wide = value.to(tl.float32)
        squares += wide * wide
        chunks = chunks + (wide * gain[chunk].to(tl.float32),)
    return chunks, squares


@triton.jit
def _join(parts, ROWS: tl.constexpr):
    """The rows' tensors as one, whose axes of size 2 are the bits of the row, low bit first.

    Joined, the rows are reduced over the threads in one exchange instead of one each.
    """
    if ROWS == 4:
        joined = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
    elif ROWS == 2:
        joined = tl.join(parts[0], parts[1])
    else:
        joined = parts[0]
    return joined


@triton.jit
def _output_index(columns, ROWS: tl.constexpr):
    """(column, row) of each output, in the shape `_join` gives."""
    bit = tl.arange(0, 2)
    if ROWS == 4:
        index = columns[:, None, None], bit[None, :, None] + 2 * bit[None, None, :]
    elif ROWS == 2:
        index = columns[:, None], bit[None, :]
    else:
        index = columns, tl.zeros_like(columns)
    return index


@triton.jit
def partials(
    tiles, vectors,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Each thread's partial dot products of weight tiles with every row: [BLOCK_N, threads] joined over rows."""
    parts = ()
    for row in tl.static_range(ROWS):
        part = tl.zeros((BLOCK_N, BLOCK_K // WIDE), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            product = tiles[chunk].to(tl.float32) * vectors[row][chunk].to(tl.float32)[None, :]
            part += tl.sum(tl.reshape(product, (BLOCK_N, BLOCK_K // WIDE, WIDE)), 2)
        parts = parts + (part,)
    return _join(parts, ROWS)


@triton.jit
def _adapter_tiles(
    b, slots, first, rows, N,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """For each row b of its slot, of outputs [first, first + BLOCK_N): tiles [BLOCK_N, BLOCK_R], zeros without a slot.
    With HALVES of 2 those of the gate and of up."""
    columns, ranks = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    tiles = ()
    for row in tl.static_range(ROWS):
        slot = tl.load(slots + tl.minimum(row, rows - 1)).to(tl.int64)
        mask = (columns < N)[:, None] & (ranks < RANK)[None, :] & (slot >= 0)
        for half in tl.static_range(HALVES):
            at = b + (slot * RANK + ranks[None, :]) * HALVES * N + (columns + half * N)[:, None]
            tiles = tiles + (tl.load(at, mask=mask, other=0.0),)
    return tiles


@triton.jit
def _adapter_shares(
    inner, bounds, first, rows, N,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """The inner products that go with `_adapter_tiles`: those of the outputs' parts."""
    columns, ranks = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    shares = ()
    for row in tl.static_range(ROWS):
        own = inner + tl.minimum(row, rows - 1) * RANKS
        for half in tl.static_range(HALVES):
            at = columns + half * N
            part = (at >= bounds[0]).to(tl.int32) + (at >= bounds[1]).to(tl.int32) + (at >= bounds[2]).to(tl.int32)
            mask = (columns < N)[:, None] & (ranks < RANK)[None, :]
            shares = shares + (tl.load(own + part[:, None] * RANK + ranks[None, :], mask=mask, other=0.0),)
    return shares


@triton.jit
def _adapted(tiles, shares, half: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr):
    """What adapters add to a block of outputs, joined over rows."""
    parts = ()
    for row in tl.static_range(ROWS):
        grown = tiles[row * HALVES + half].to(tl.float32) * shares[row * HALVES + half]
        parts = parts + (tl.sum(grown, 1),)
    return _join(parts, ROWS)


@triton.jit
def _write(
    tiles, vectors, scale, bias, grown, shares, y, first, rows, N,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Store outputs [first, first + BLOCK_N) of every row; `scale` is the rows' 1 / rms, joined."""
    column, row = _output_index(first + tl.arange(0, BLOCK_N), ROWS)
    inside = column < N
    part = partials(tiles[:CHUNKS], vectors, ROWS, BLOCK_N, BLOCK_K, CHUNKS, WIDE)
    if SILU:
        gated = partials(tiles[CHUNKS:], vectors, ROWS, BLOCK_N, BLOCK_K, CHUNKS, WIDE)
        out, up = tl.split(tl.sum(tl.join(part, gated), 1))
        if scale is not None:
            out *= scale
            up *= scale
        if bias is not None:
            out += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(bias + N + column, mask=inside, other=0.0).to(tl.float32)
        if grown is not None:
            out += _adapted(grown, shares, 0, ROWS, 2)
            up += _adapted(grown, shares, 1, ROWS, 2)
        out = out / (1 + tl.exp(-out)) * up
    else:
        out = tl.sum(part, 1)
        if scale is not None:
            out *= scale
        if bias is not None:
            out += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        if grown is not None:
            out += _adapted(grown, shares, 0, ROWS, 1)
    tl.store(y + row * N + column, out.to(y.dtype.element_ty), mask=inside & (row < rows))


@triton.jit(do_not_specialize=["rows"])
def _vector(
    x, residual, gain, weight, bias, stream, y, rows, N, eps, inner, b, slots, bounds,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    SILU: tl.constexpr, LOOP: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
    RANK: tl.constexpr = 0, RANKS: tl.constexpr = 0, BLOCK_R: tl.constexpr = 0,
):  # fmt: skip
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0)
    tiles = _tiles(weight, program * BLOCK_N, N, K, BLOCK_N, BLOCK_K, SILU)
    gains = None
    if gain is not None:
        gains = load_chunks(gain, K, BLOCK_K)
    HALVES: tl.constexpr = 2 if SILU else 1
    grown = None
    shares = None
    if inner is not None:
        tl.static_assert(not LOOP)
        grown = _adapter_tiles(b, slots, program * BLOCK_N, rows, N, RANK, BLOCK_R, ROWS, BLOCK_N, HALVES)
    if PDL:
        # EARLY: the next kernel's weight loads queue behind ours while both wait; it has fewer free registers then.
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    # All loads precede all stores: the compiler may not move a load over a store.
    vectors = ()
    carried = ()
    for row in tl.static_range(ROWS):
        at = tl.minimum(row, rows - 1) * K
        vectors = vectors + (load_chunks(x + at, K, BLOCK_K),)
        if residual is not None:
            carried = carried + (load_chunks(residual + at, K, BLOCK_K),)
    if inner is not None:
        shares = _adapter_shares(inner, bounds, program * BLOCK_N, rows, N, RANK, RANKS, BLOCK_R, ROWS, BLOCK_N, HALVES)
    scale = None
    if gain is not None:
        weighted = ()
        squares = ()
        for row in tl.static_range(ROWS):
            if residual is not None:
                # One program writes the new stream, to another tensor: the others may still read the old one.
                writes = (program == 0) & (row < rows)
                chunks, square = apply_gain(vectors[row], carried[row], gains, stream + row * K, writes, K, BLOCK_K)
            else:
                chunks, square = apply_gain(vectors[row], None, gains, None, False, K, BLOCK_K)
            weighted = weighted + (chunks,)
            squares = squares + (square,)
        vectors = weighted
        scale = tl.rsqrt(tl.sum(_join(squares, ROWS), 0) / K + eps)
        if ROWS > 1:
            scale = scale[None]
    if LOOP:
        step = tl.num_programs(0) * BLOCK_N
        for first in range(program * BLOCK_N, N, step):
            ahead = _tiles(weight, first + step, N, K, BLOCK_N, BLOCK_K, SILU)
            _write(
                tiles, vectors, scale, bias, None, None, y, first, rows, N, ROWS, BLOCK_N, BLOCK_K, CHUNKS, WIDE, SILU
            )  # fmt: skip
            tiles = ahead
    else:
        first = program * BLOCK_N
        _write(
            tiles, vectors, scale, bias, grown, shares, y, first, rows, N, ROWS, BLOCK_N, BLOCK_K, CHUNKS, WIDE, SILU
        )  # fmt: skip


def vector_launch(gemm: Gemm, config: GemmConfig) -> GemmLaunch:
    """The launch of a GEMM of at most MAX_ROWS rows."""
    if gemm.rows > MAX_ROWS:
        raise ValueError(f"{config} is for at most {MAX_ROWS} rows, not {gemm.rows}")
    out = gemm.new_output()
    outputs = out.shape[1]
    programs = triton.cdiv(outputs, config.block_n)
    if config.programs:
        programs = min(programs, config.programs * num_sms())
    arguments = (
        gemm.x, gemm.residual, gemm.gain, gemm.weight, gemm.bias, gemm.stream, out,
        gemm.rows, outputs, gemm.eps, *_adapter_arguments(gemm),
    )  # fmt: skip
    constants = _constants(config, gemm.rows, gemm.depth, gemm.x.element_size(), gemm.silu)
    if gemm.low is not None:
        rank = gemm.low.b.shape[1]
        constants = constants | {
            "RANK": rank, "RANKS": gemm.low.a.shape[1], "BLOCK_R": triton.next_power_of_2(rank)
        }  # fmt: skip
    return GemmLaunch(_vector, programs, arguments, constants, out)


def _adapter_arguments(gemm: Gemm) -> tuple[Any, ...]:
    if gemm.low is None:
        return None, None, None, None
    width = gemm.low.bounds[-1]
    return gemm.inner, gemm.low.b, gemm.low.tokens.slots, (*gemm.low.bounds[1:-1], width, width, width)[:3]


@functools.cache
def _constants(config: GemmConfig, rows: int, depth: int, itemsize: int, silu: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options: a thread loads 16 bytes of each weight row and chunk."""
    wide = 16 // itemsize
    return {
        "K": depth,
        "ROWS": triton.next_power_of_2(rows),
        "BLOCK_N": config.block_n,
        "BLOCK_K": 32 * config.warps * wide,
        "WIDE": wide,
        "SILU": silu,
        "LOOP": config.programs > 0,
        "EARLY": config.early,
        "num_warps": config.warps,
        **pdl(),
    }
