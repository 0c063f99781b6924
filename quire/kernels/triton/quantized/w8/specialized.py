"""GEMM `specialized` of 8-bit codes: thousands of rows on Hopper, with a warp that only loads.

Tiles [64 * CONSUMERS rows, 256 outputs]: TMA loads tiles of both operands into a ring in shared memory; each warpgroup
of CONSUMERS multiplies its 64 rows with all 256 outputs by WGMMA and stores them. Loads run ahead into the next tile,
and the warpgroups are in step only as far as the ring is deep, so that one may store while others multiply. With two
warpgroups a warp of its own issues the loads. With three the first of them does, since a fourth warpgroup would leave
too few registers; a tile then takes 22% fewer bytes per operation from L2.

Written in Gluon, which has no interpreter: `large.py` is what tests on a CPU walk through.

Bytes: per tile (64 * CONSUMERS + 256) * in, mostly from L2. Operations: 2 per weight and row.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.triton.launch import num_sms
from quire.kernels.triton.quantized.w8.tile import CodedGemm
from quire.kernels.triton.skinny_gemm.common import GemmConfig, GemmLaunch

ROW_GROUP = 8
"""Row tiles whose programs run side by side with the same weights."""


@gluon.jit
def _place(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """(row tile, column tile): groups of rows that share weights and inputs in L2."""
    first = tile // (GROUP * column_tiles) * GROUP
    size = gl.minimum(row_tiles - first, GROUP)
    within = tile % (GROUP * column_tiles)
    return first + within % size, within // size


@gluon.jit
def _fill(
    x_view, w_view, x_ring, w_ring, full, empty, row_tiles, column_tiles, steps, second, count,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Load what the program's step number `count`, over all its tiles, multiplies; nothing past its last."""
    BLOCK_K: gl.constexpr = x_view.block_type.shape[1]
    BYTES: gl.constexpr = (64 * CONSUMERS + 256) * BLOCK_K
    tile = gl.program_id(0) + count // steps * gl.num_programs(0)
    if tile < row_tiles * column_tiles:
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, GROUP)
        row = row_tile * 64 * CONSUMERS
        output = column_tile * BLOCK_N
        k = count % steps * BLOCK_K
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        barrier = full.index(stage)
        mbarrier.expect(barrier, BYTES)
        weights = w_ring.index(stage)
        for part in gl.static_range(CONSUMERS):
            tma.async_copy_global_to_shared(
                x_view, [row + 64 * part, k], barrier, x_ring.index(stage * CONSUMERS + part)
            )
        tma.async_copy_global_to_shared(w_view, [output, k], barrier, weights.slice(0, 128))
        tma.async_copy_global_to_shared(w_view, [output + second, k], barrier, weights.slice(128, 128))


@gluon.jit
def _load(
    x_view, w_view, x_ring, w_ring, full, empty, row_tiles, column_tiles, steps, second,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warp that only loads: fills the ring, tile after tile."""
    tiles = gl.cdiv(row_tiles * column_tiles - gl.program_id(0), gl.num_programs(0))
    for count in range(tiles * steps):
        _fill(x_view, w_view, x_ring, w_ring, full, empty, row_tiles, column_tiles, steps, second, count,
              CONSUMERS, STAGES, BLOCK_N, GROUP)  # fmt: skip


@gluon.jit
def _scaled(total, x_scale, scale, bias, stream, row, output, skip, rows, N, y_stride,
            BIAS: gl.constexpr, ADD: gl.constexpr):  # fmt: skip
    """Sums of codes [64, 128] as outputs in float32."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    lines = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    columns = output + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    out = gl.convert_layout(total, LAYOUT).to(gl.float32)
    out = out * gl.load(x_scale + lines, mask=lines < rows, other=0.0)[:, None]
    out = out * gl.load(scale + skip + columns, mask=columns < N, other=0.0)[None, :]
    if BIAS:
        out += gl.load(bias + skip + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    if ADD:
        at = stream + lines.to(gl.int64)[:, None] * y_stride + columns[None, :]
        out += gl.load(at, mask=(lines < rows)[:, None] & (columns < N)[None, :], other=0.0).to(gl.float32)
    return out


@gluon.jit
def _store(y_view, out, staging, row, output):
    """Store outputs [64, 128] through shared memory."""
    tma.store_wait(0)
    staging.store(out.to(y_view.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_view, [row, output], staging)


@gluon.jit
def _multiply(
    PART: gl.constexpr, LOADS: gl.constexpr, x_view, w_view, second, x_ring, w_ring, full, empty,
    x_scale, scale, bias, stream, y_view, staging, row_tiles, column_tiles, steps, rows, N, y_stride,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, SILU: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warpgroup: multiplies and stores rows [64 * PART, + 64) of every tile. LOADS: it also fills the ring."""
    SUM: gl.constexpr = gl.int32 if x_ring.dtype == gl.int8 else gl.float32
    # Triton 3.6 has no integer instruction of 256 columns.
    WIDTH: gl.constexpr = 128 if x_ring.dtype == gl.int8 else 256
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    count = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, GROUP)
        row = row_tile * 64 * CONSUMERS + 64 * PART
        output = column_tile * BLOCK_N
        total = warpgroup_mma_init(gl.zeros((64, 256), SUM, layout=LAYOUT))
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            total = warpgroup_mma(
                x_ring.index(stage * CONSUMERS + PART), w_ring.index(stage).permute((1, 0)), total,
                use_acc=step > 0, is_async=True,
            )  # fmt: skip
            # The previous product is done: its stage may be loaded again.
            total = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(total,)))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            if LOADS:  # noqa: SIM102  # a constant, then a value of the run
                if step > 0:
                    _fill(x_view, w_view, x_ring, w_ring, full, empty, row_tiles, column_tiles, steps, second,
                          count - 1 + STAGES, CONSUMERS, STAGES, BLOCK_N, GROUP)  # fmt: skip
            count += 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        if LOADS:
            _fill(x_view, w_view, x_ring, w_ring, full, empty, row_tiles, column_tiles, steps, second,
                  count - 1 + STAGES, CONSUMERS, STAGES, BLOCK_N, GROUP)  # fmt: skip
        left, right = total.reshape((64, 2, 128)).permute((0, 2, 1)).split()
        buffer = staging.index(PART)
        if SILU:
            gate = _scaled(left, x_scale, scale, bias, stream, row, output, 0, rows, N, y_stride, BIAS, False)
            up = _scaled(right, x_scale, scale, bias, stream, row, output, N, rows, N, y_stride, BIAS, False)
            _store(y_view, gate / (1 + gl.exp(-gate)) * up, buffer, row, output)
        else:
            out = _scaled(left, x_scale, scale, bias, stream, row, output, 0, rows, N, y_stride, BIAS, ADD)
            _store(y_view, out, buffer, row, output)
            out = _scaled(right, x_scale, scale, bias, stream, row, output + 128, 0, rows, N, y_stride, BIAS, ADD)
            _store(y_view, out, buffer, row, output + 128)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def _specialized(
    x_view, x_scale, w_view, scale, bias, stream, y_view, rows, N, K, y_stride,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, SILU: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = x_view.block_type.shape[1]
    BLOCK_N: gl.constexpr = 128 if SILU else 256
    x_ring = gl.allocate_shared_memory(x_view.dtype, [STAGES * CONSUMERS, 64, BLOCK_K], x_view.layout)
    w_ring = gl.allocate_shared_memory(w_view.dtype, [STAGES, 256, BLOCK_K], w_view.layout)
    staging = gl.allocate_shared_memory(y_view.dtype, [CONSUMERS, 64, 128], y_view.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    row_tiles = gl.cdiv(rows, 64 * CONSUMERS)
    column_tiles = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    # The second half of a tile's weights: up rows, or the next outputs.
    second = N if SILU else 128
    # Tuples in place: in a variable their constants would become values of the run.
    if CONSUMERS == 3:
        for count in gl.static_range(STAGES):
            _fill(x_view, w_view, x_ring, w_ring, full, empty, row_tiles, column_tiles, steps, second, count,
                  CONSUMERS, STAGES, BLOCK_N, GROUP)  # fmt: skip
        gl.warp_specialize(
            [
                (_multiply, (0, True, x_view, w_view, second, x_ring, w_ring, full, empty, x_scale, scale, bias,
                             stream, y_view, staging, row_tiles, column_tiles, steps, rows, N, y_stride,
                             CONSUMERS, STAGES, SILU, BIAS, ADD, BLOCK_N, GROUP)),
                (_multiply, (1, False, x_view, w_view, second, x_ring, w_ring, full, empty, x_scale, scale, bias,
                             stream, y_view, staging, row_tiles, column_tiles, steps, rows, N, y_stride,
                             CONSUMERS, STAGES, SILU, BIAS, ADD, BLOCK_N, GROUP)),
                (_multiply, (2, False, x_view, w_view, second, x_ring, w_ring, full, empty, x_scale, scale, bias,
                             stream, y_view, staging, row_tiles, column_tiles, steps, rows, N, y_stride,
                             CONSUMERS, STAGES, SILU, BIAS, ADD, BLOCK_N, GROUP)),
            ],
            [4, 4], [168, 168],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, False, x_view, w_view, second, x_ring, w_ring, full, empty, x_scale, scale, bias,
                             stream, y_view, staging, row_tiles, column_tiles, steps, rows, N, y_stride,
                             CONSUMERS, STAGES, SILU, BIAS, ADD, BLOCK_N, GROUP)),
                (_multiply, (1, False, x_view, w_view, second, x_ring, w_ring, full, empty, x_scale, scale, bias,
                             stream, y_view, staging, row_tiles, column_tiles, steps, rows, N, y_stride,
                             CONSUMERS, STAGES, SILU, BIAS, ADD, BLOCK_N, GROUP)),
                (_load, (x_view, w_view, x_ring, w_ring, full, empty, row_tiles, column_tiles, steps, second,
                         CONSUMERS, STAGES, BLOCK_N, GROUP)),
            ],
            [4, 1], [232, 24],
        )  # fmt: skip


def specialized_launch(gemm: CodedGemm, config: GemmConfig) -> GemmLaunch:
    """The launch of a GEMM of any number of rows, block_m of them (128 or 192) a tile; scales per output."""
    if gemm.block is not None:
        raise ValueError(f"{config} takes scales per output, not per block")
    out = gemm.output()
    rows, depth, outputs = gemm.rows, gemm.depth, out.shape[1]
    consumers = config.block_m // 64
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(outputs, 128 if gemm.silu else 256)
    codes = gl.NVMMASharedLayout(128, 8, 2)
    x_view = TensorDescriptor.from_tensor(gemm.x.codes, [64, config.block_k], codes)
    w_view = TensorDescriptor.from_tensor(gemm.weight, [128, config.block_k], codes)
    y_view = TensorDescriptor.from_tensor(out, [64, 128], gl.NVMMASharedLayout(128, 16, 2))
    # Partitions take no None.
    bias = gemm.scale if gemm.bias is None else gemm.bias
    arguments = (
        x_view, gemm.x.scale, w_view, gemm.scale, bias, out, y_view, rows, outputs, depth, out.stride(0),
    )  # fmt: skip
    constants = _constants(consumers, config.stages, gemm.silu, gemm.bias is not None, gemm.stream is not None)
    return GemmLaunch(_specialized, min(tiles, num_sms()), arguments, constants, out)


@functools.cache
def _constants(consumers: int, stages: int, silu: bool, bias: bool, add: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    return {
        "CONSUMERS": consumers,
        "STAGES": stages,
        "SILU": silu,
        "BIAS": bias,
        "ADD": add,
        "GROUP": ROW_GROUP,
        "num_warps": 4,
    }
