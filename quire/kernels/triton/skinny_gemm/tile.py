"""Skinny GEMM `tile`: 8 to 512 rows on large tensor-core tiles, with split-K or stream-K to balance multiprocessors.

The result is computed transposed, weight @ x.T: Hopper's WGMMA multiplies 64 rows by any multiple of 8 columns, so the
many weight rows take the side of 64 and the few rows of x the side of any size.

A tile may be computed by several programs, each over a range of K: by `split` programs (split-K), or, with `programs`,
by those among which all iterations of all tiles, in one list, are divided equally (stream-K). A program that
computed part of a tile writes it to a workspace; the last one to arrive sums the parts in a fixed order, so the bits do
not depend on which is last.

Bytes: the weight once (for up to block_m rows), the input once per program, from cache; tile parts, which stay in L2.
Operations: 2 per weight and row, on tensor cores.
"""

# ruff: noqa: N803

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.skinny_gemm.common import Gemm, GemmConfig, GemmLaunch, finish, prefetch_rows, prefetch_shape

MAX_SHARED_TILES = 65536
"""Most tiles of a GEMM that programs may share: the number of arrival counters."""


@triton.jit
def _weight_tile(
    weight, view, skip, output, k, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr
):
    """Weights [BLOCK_N, BLOCK_K] from (skip + output, k); `view` is the weight's TMA descriptor, or None."""
    if view is not None:
        tile = view.load([skip + output, k])
    else:
        # Outputs past the end repeat the last and are not stored.
        rows = (skip + tl.minimum(output + tl.arange(0, BLOCK_N), N - 1)).to(tl.int64)
        columns = k + tl.arange(0, BLOCK_K)
        at = weight + rows[:, None] * K + columns[None, :]
        if EVEN_K:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=columns[None, :] < K, other=0.0)
    return tile


@triton.jit
def _accumulate(
    x, x_view, residual, gain, weight, view, stream, row, output, begin, end, rows, N, K, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SILU: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Outputs [output, + BLOCK_N) of rows [row, + BLOCK_M), summed over inputs [begin, end): (gate, up)."""
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    gated = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    line = row + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    at = line.to(tl.int64) * K + columns
    if gain is not None:
        gains = tl.load(gain + begin + columns, mask=begin + columns < K, other=0.0)
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        tile = _weight_tile(weight, view, 0, output, k, N, K, BLOCK_N, BLOCK_K, EVEN_K)
        if x_view is not None:
            value = x_view.load([row, k])
        else:
            inside = line < rows
            if not EVEN_K:
                inside = inside & (k + columns < K)
            value = tl.load(x + at + k, mask=inside, other=0.0)
            if gain is not None:
                if residual is not None:
                    carried = tl.load(residual + at + k, mask=inside, other=0.0)
                    value = (value.to(tl.float32) + carried.to(tl.float32)).to(value.dtype)
                    tl.store(stream + at + k, value, mask=inside & (output == 0))
                wide = value.to(tl.float32)
                squares += tl.sum(wide * wide, 1)
                value = (wide * gains.to(tl.float32)).to(value.dtype)
                # One iteration ahead: the compiler does not pipeline a load this narrow.
                ahead = k + BLOCK_K + columns
                gains = tl.load(gain + ahead, mask=ahead < K, other=0.0)
        total = tl.dot(tile, value.T, total, input_precision="ieee")
        if SILU:
            tile = _weight_tile(weight, view, N, output, k, N, K, BLOCK_N, BLOCK_K, EVEN_K)
            gated = tl.dot(tile, value.T, gated, input_precision="ieee")
    if gain is not None:
        scale = tl.rsqrt(squares / K + eps)[None, :]
        total *= scale
        gated *= scale
    return total, gated


@triton.jit
def _first_iteration(program, work, programs):
    """The first iteration of `program`, where `work` iterations are divided among `programs`."""
    return (work.to(tl.int64) * program // programs).to(tl.int32)


@triton.jit
def _owner(step, work, programs):
    """The program that computes an iteration."""
    return ((programs.to(tl.int64) * (step + 1) - 1) // work).to(tl.int32)


@triton.jit
def _part(
    parts, program, tile, steps, work, programs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SILU: tl.constexpr
):
    """The workspace of a program's part of a tile. It has at most two: of its first tile and of its last."""
    later = (_first_iteration(program, work, programs) // steps != tile).to(tl.int32)
    slot = (program + later * programs).to(tl.int64) * (2 if SILU else 1)
    offset = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return parts + slot * BLOCK_N * BLOCK_M + offset


@triton.jit
def _sum_parts(
    parts, bias, y, tile, row, column, first, last, rows, N, steps, work, programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a tile that programs first to last wrote, and finish it."""
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    gated = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for program in tl.range(first, last + 1, num_stages=1):
        at = _part(parts, program, tile, steps, work, programs, BLOCK_M, BLOCK_N, SILU)
        # From L2: L1 is not coherent with what other multiprocessors wrote.
        total += tl.load(at, cache_modifier=".cg")
        if SILU:
            gated += tl.load(at + BLOCK_N * BLOCK_M, cache_modifier=".cg")
    finish(total, gated, bias, y, row, column, rows, N, SILU)


@triton.jit
def _prefetch_tile(weight, tile, k, row_tiles, N, K, BLOCK_N: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr,
                   SILU: tl.constexpr):  # fmt: skip
    """Prefetch the first weights of a tile, from input k on, into L2."""
    outputs = tl.minimum(tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    # Not past the end of the row: for the last row that is the end of memory.
    k = tl.minimum(k, K - SPAN)
    at = weight + outputs * K + k
    prefetch_rows(at, K - k, SPANS, SPAN)
    if SILU:
        prefetch_rows(at + N.to(tl.int64) * K, K - k, SPANS, SPAN)


@triton.jit(do_not_specialize=["rows"])
def _tile(
    x, x_view, residual, gain, weight, view, bias, stream, y, parts, arrivals, rows, N, K, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SILU: tl.constexpr,
    EVEN_K: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    steps = tl.cdiv(K, BLOCK_K)
    work = row_tiles * tl.cdiv(N, BLOCK_N) * steps
    if parts is None:
        begin = program * steps
        end = begin + steps
    else:
        begin = _first_iteration(program, work, programs)
        end = _first_iteration(program + 1, work, programs)
    if PDL:
        _prefetch_tile(weight, begin // steps, begin % steps * BLOCK_K, row_tiles, N, K, BLOCK_N, SPANS, SPAN, SILU)
        gdc_wait()
        gdc_launch_dependents()
    for tile in range(begin // steps, (end - 1) // steps + 1):
        # Consecutive tiles share weights: same outputs, next rows.
        row = tile % row_tiles * BLOCK_M
        output = tile // row_tiles * BLOCK_N
        low = tl.maximum(begin - tile * steps, 0)
        high = tl.minimum(end - tile * steps, steps)
        total, gated = _accumulate(
            x, x_view, residual, gain, weight, view, stream, row, output, low * BLOCK_K, high * BLOCK_K,
            rows, N, K, eps, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SILU, EVEN_K,
        )  # fmt: skip
        lines = row + tl.arange(0, BLOCK_M)[None, :]
        columns = output + tl.arange(0, BLOCK_N)[:, None]
        if parts is None or high - low == steps:
            finish(total, gated, bias, y, lines, columns, rows, N, SILU)
        else:
            at = _part(parts, program, tile, steps, work, programs, BLOCK_M, BLOCK_N, SILU)
            tl.store(at, total)
            if SILU:
                tl.store(at + BLOCK_N * BLOCK_M, gated)
            first = _owner(tile * steps, work, programs)
            last = _owner(tile * steps + steps - 1, work, programs)
            # All threads must have written before one of them counts the arrival.
            tl.debug_barrier()
            if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == last - first:
                _sum_parts(
                    parts, bias, y, tile, lines, columns, first, last, rows, N, steps, work, programs,
                    BLOCK_M, BLOCK_N, SILU,
                )  # fmt: skip
                tl.store(arrivals + tile, 0)


def tile_launch(gemm: Gemm, config: GemmConfig) -> GemmLaunch:
    """The launch of a GEMM of any number of rows; a fused norm excludes split-K and stream-K."""
    out = gemm.new_output()
    rows, depth, outputs = gemm.rows, gemm.depth, out.shape[1]
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(outputs, config.block_n)
    programs = _programs(config, tiles, triton.cdiv(depth, config.block_k))
    parts = arrivals = None
    if programs != tiles:
        if gemm.gain is not None:
            raise ValueError(f"{config}: a fused norm needs whole tiles, without split-K or stream-K")
        slots = programs * (2 if config.programs else 1) * (2 if gemm.silu else 1)
        parts = out.new_empty(slots * config.block_n * config.block_m, dtype=torch.float32)
        arrivals = _arrivals(out.device)
    x_view = view = None
    if config.tma:
        view = TensorDescriptor.from_tensor(gemm.weight, [config.block_n, config.block_k])
        if gemm.gain is None:
            x_view = TensorDescriptor.from_tensor(gemm.x, [config.block_m, config.block_k])
    arguments = (
        gemm.x, x_view, gemm.residual, gemm.gain, gemm.weight, view, gemm.bias, gemm.stream, out,
        parts, arrivals, rows, outputs, depth, gemm.eps,
    )  # fmt: skip
    return GemmLaunch(_tile, programs, arguments, _constants(config, depth, gemm.x.element_size(), gemm.silu), out)


def _programs(config: GemmConfig, tiles: int, steps: int) -> int:
    """Programs of a GEMM; if as many as `tiles`, each computes a whole tile."""
    if config.programs:
        programs = min(config.programs * num_sms(), tiles * steps)
    else:
        programs = tiles * min(config.split, steps)
    return programs if tiles <= MAX_SHARED_TILES else tiles


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Arrival counters of tiles, all zero between kernels: the last arrival resets.

    One set a device: GEMMs that share tiles must not run concurrently on two streams.
    """
    return torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)


@functools.cache
def _constants(config: GemmConfig, depth: int, itemsize: int, silu: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    spans, span = prefetch_shape(config.block_n, depth, itemsize, config.warps)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.stages,
        "SILU": silu,
        "EVEN_K": depth % config.block_k == 0,
        "SPANS": spans,
        "SPAN": span,
        "num_warps": config.warps,
        **pdl(),
    }
