"""Prompts of gated delta nets, in chunks (arXiv 2406.06484, 2412.06464): four kernels.

1. Convolution (`chunks.py`).
2. For each chunk and head, independently: the updates of a chunk's tokens, which depend on each other, are the solution
   of a triangular system (I + A) U = beta (V - e^g K S^T). Its inverse is applied to beta V and to beta e^g K, so what
   is left for the scan is U = values - keys S^T. Also the products of queries and keys within the chunk.
3. The scan: for each row, head and some of the value dimensions, the chunks in order, with the state in registers.
4. Norm and gate (`norm.py`).

The inverse is computed block by block: from the inverses X of diagonal blocks of b rows, those of 2 b rows are
X - X A' X, where A' is A within the larger blocks and outside the smaller. Unlike powers of A this is stable. It can
begin with blocks of one row, or with larger ones that are inverted by substitution.

Operations for a chunk of C tokens, of each head: 2 C^2 (3 dk + dv) + 4 C^3 log2(C) here, 2 C (3 dk dv + C dv) in the
scan. Operands are in the activations' dtype, sums and states in float32.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.states import DeltaNet, States, StepRows
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.recurrent.chunks import CHUNK, convolve, plan_chunks
from quire.kernels.triton.recurrent.common import (
    MAX_TAPS,
    input_precision,
    keep_inputs,
    places_of,
    ring_at,
    softplus,
    state_at,
    table_of,
    tables_of,
)
from quire.kernels.triton.recurrent.norm import norm_gate


@dataclass(frozen=True)
class DeltaNetConfig:
    """Shapes of the kernels."""

    solve_warps: int = 4
    solve_precision: str = "tf32"
    solve_leaf: int = 1
    """Rows of the blocks that are inverted by substitution."""
    scan_values: int = 32
    """Value dimensions of a program of the scan."""
    scan_warps: int = 4
    scan_stages: int = 2


@triton.jit
def _leaves(A, CHUNK: tl.constexpr, LEAF: tl.constexpr):
    """The inverses of I + A within diagonal blocks of LEAF rows, by substitution; zeros outside of them."""
    BLOCKS: tl.constexpr = CHUNK // LEAF
    # [row's block, row, column's block, column] -> [block, row, column]
    block = tl.arange(0, BLOCKS)
    diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    M = tl.sum(tl.where(diagonal, tl.reshape(A, (BLOCKS, LEAF, BLOCKS, LEAF)), 0.0), axis=2)
    line = tl.arange(0, LEAF)[None, :, None]
    X = tl.where(line == tl.arange(0, LEAF)[None, None, :], 1.0, 0.0) + tl.zeros((BLOCKS, LEAF, LEAF), tl.float32)
    for i in tl.static_range(1, LEAF):
        of_row = tl.sum(tl.where(line == i, M, 0.0), axis=1)  # [block, column]
        before = tl.sum(tl.where(line < i, of_row[:, :, None] * X, 0.0), axis=1)
        X -= tl.where(line == i, before[:, None, :], 0.0)
    return tl.reshape(tl.where(diagonal, X[:, :, None, :], 0.0), (CHUNK, CHUNK))


@triton.jit
def _inverse(A, CHUNK: tl.constexpr, LEAF: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for a strictly lower triangular A; diagonal blocks of LEAF rows by substitution."""
    lane = tl.arange(0, CHUNK)
    lower = lane[:, None] > lane[None, :]
    A = tl.where(lower, A, 0.0)
    if LEAF == 1:
        X = tl.where(lane[:, None] == lane[None, :], 1.0, 0.0)
    else:
        X = _leaves(A, CHUNK, LEAF)
    for level in tl.static_range(8):
        if (1 << level) >= LEAF and (1 << level) < CHUNK:
            apart = (lane[:, None] >> level) != (lane[None, :] >> level)
            together = (lane[:, None] >> (level + 1)) == (lane[None, :] >> (level + 1))
            part = tl.where(apart & together, A, 0.0)
            if level == 0:
                X -= part
            else:
                X -= tl.dot(tl.dot(X, part, input_precision=PRECISION), X, input_precision=PRECISION)
    return X


@triton.jit(do_not_specialize=["skipped"])
def _solve(
    mixed, projected, projected_stride, decay, dt_bias, values, keys, scores, totals,
    ring, ring_pages, ring_offsets, ring_stride,
    tables, table_stride, rows, query_starts, context_lens, chunk_rows, chunk_begins, skipped,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    SLOTS: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
    LEAF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    REPEAT: tl.constexpr = VALUE_HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    SIZE: tl.constexpr = projected.dtype.element_ty.primitive_bitwidth // 8
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(chunk_rows + chunk)
    if row >= 0:
        first = tl.load(query_starts + row)
        count = tl.load(query_starts + row + 1) - first
        chunk_begin = tl.load(chunk_begins + chunk)
        lane = tl.arange(0, CHUNK)
        place = chunk_begin + lane
        exists = place < count
        token = (first + place).to(tl.int64)
        gates = projected + token * projected_stride + CHANNELS + VALUE_HEADS * DV + head
        b = tl.load(gates, mask=exists, other=0.0).to(tl.float32)
        a = tl.load(gates + VALUE_HEADS, mask=exists, other=0.0).to(tl.float32)
        beta = tl.where(exists, 1.0 / (1.0 + tl.exp(-b)), 0.0)
        step = tl.where(exists, tl.load(decay + head) * softplus(a + tl.load(dt_bias + head)), 0.0)
        total = tl.cumsum(step, axis=0)

        packed = token - skipped
        k_lane, v_lane = tl.arange(0, DK), tl.arange(0, DV)
        line = mixed + packed[:, None] * CHANNELS
        q_at = line + head // REPEAT * DK + k_lane[None, :]
        k = tl.load(q_at + KEY_HEADS * DK, mask=exists[:, None], other=0.0)
        lower = lane[:, None] >= lane[None, :]
        # Above the diagonal the difference is positive, and e to it may overflow.
        between = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)
        place_of = packed * VALUE_HEADS + head
        q = tl.load(q_at, mask=exists[:, None], other=0.0)
        P = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        tl.store(scores + place_of[:, None] * CHUNK + lane[None, :], P, mask=exists[:, None])
        tl.store(totals + place_of, total, mask=exists)
        A = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * beta[:, None]
        X = _inverse(A, CHUNK, LEAF, SOLVE).to(q.dtype)

        # Loaded again rather than held in registers meanwhile.
        k = tl.load(q_at + KEY_HEADS * DK, mask=exists[:, None], other=0.0)
        weighted = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(k.dtype)
        W = tl.dot(X, weighted, input_precision=PRECISION)
        tl.store(keys + place_of[:, None] * DK + k_lane[None, :], W, mask=exists[:, None])
        v = tl.load(line + 2 * KEY_HEADS * DK + head * DV + v_lane[None, :], mask=exists[:, None], other=0.0)
        U = tl.dot(X, (v.to(tl.float32) * beta[:, None]).to(v.dtype), input_precision=PRECISION)
        tl.store(values + place_of[:, None] * DV + v_lane[None, :], U, mask=exists[:, None])

        # The convolution, which read the ring, has ended.
        if chunk_begin + CHUNK >= count:
            table = table_of(tables, table_stride, rows, row)
            begin = tl.maximum(tl.load(context_lens + row) - count, 0)
            inputs = projected + first.to(tl.int64) * projected_stride
            every_k, every_v = k_lane < DK, v_lane < DV
            v_channel = 2 * KEY_HEADS * DK + head * DV + v_lane
            v_ring = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, v_channel, every_v, PIECE, SIZE)
            keep_inputs(inputs, projected_stride, v_ring, v_channel, every_v, begin, count, SLOTS, PIECE)
            if head % REPEAT == 0:
                q_channel = head // REPEAT * DK + k_lane
                q_ring = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, q_channel, every_k, PIECE, SIZE)
                keep_inputs(inputs, projected_stride, q_ring, q_channel, every_k, begin, count, SLOTS, PIECE)
                k_channel = q_channel + KEY_HEADS * DK
                k_ring = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, k_channel, every_k, PIECE, SIZE)
                keep_inputs(inputs, projected_stride, k_ring, k_channel, every_k, begin, count, SLOTS, PIECE)


@triton.jit(do_not_specialize=["first_row", "skipped"])
def _scan(
    mixed, values, keys, scores, totals, out, state, state_pages, state_offsets, state_stride,
    tables, table_stride, rows, query_starts, context_lens, first_row, skipped,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    REPEAT: tl.constexpr = VALUE_HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Parts of a head are adjacent programs: they read the same keys, queries and scores.
    program = tl.program_id(0)
    part, head = program % (DV // BV), program // (DV // BV) % VALUE_HEADS
    row = first_row + program // (DV // BV * VALUE_HEADS)
    first = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first
    if count > 0:
        begin = tl.load(context_lens + row) - count
        table = table_of(tables, table_stride, rows, row)
        k_lane, v_lane, lane = tl.arange(0, DK), part * BV + tl.arange(0, BV), tl.arange(0, CHUNK)
        at = state_at(state, state_pages, state_offsets, state_stride, table, head)
        tile = at + k_lane[:, None] * DV + v_lane[None, :]
        S = tl.load(tile, mask=(begin > 0) & (k_lane[:, None] < DK), other=0.0)  # [key, value]
        packed = (first - skipped).to(tl.int64)
        line = mixed + packed * CHANNELS + head // REPEAT * DK
        base = packed * VALUE_HEADS + head
        for chunk_begin in tl.range(0, count, CHUNK, num_stages=STAGES):
            place = chunk_begin + lane
            exists = place < count
            at_token = place.to(tl.int64)
            inside = exists[:, None]
            of_head = at_token[:, None] * VALUE_HEADS
            w = tl.load(keys + (base + of_head) * DK + k_lane[None, :], mask=inside, other=0.0)
            u = tl.load(values + (base + of_head) * DV + v_lane[None, :], mask=inside, other=0.0)
            p = tl.load(scores + (base + of_head) * CHUNK + lane[None, :], mask=inside, other=0.0)
            q = tl.load(line + at_token[:, None] * CHANNELS + k_lane[None, :], mask=inside, other=0.0)
            k = tl.load(line + at_token[:, None] * CHANNELS + KEY_HEADS * DK + k_lane[None, :], mask=inside, other=0.0)
            total = tl.load(totals + base + at_token * VALUE_HEADS, mask=exists, other=0.0)
            end = tl.minimum(chunk_begin + CHUNK, count) - 1
            last = tl.load(totals + base + end.to(tl.int64) * VALUE_HEADS)
            narrow = S.to(k.dtype)
            fresh = (u.to(tl.float32) - tl.dot(w, narrow, input_precision=PRECISION)).to(k.dtype)
            carried = tl.dot(q, narrow, input_precision=PRECISION) * tl.exp(total)[:, None]
            y = carried + tl.dot(p, fresh, input_precision=PRECISION)
            tl.store(out + (base + of_head) * DV + v_lane[None, :], y, mask=inside)
            # Tokens past the end have keys of zeros.
            weighted = (k.to(tl.float32) * tl.exp(last - total)[:, None]).to(k.dtype)
            S = S * tl.exp(last) + tl.dot(tl.trans(weighted), fresh, input_precision=PRECISION)
        tl.store(tile, S)


def delta_net_prompts(
    projected: torch.Tensor,
    layer: DeltaNet,
    states: States,
    step: StepRows,
    out: torch.Tensor,
    config: DeltaNetConfig | None = None,
) -> None:
    """The rows of a step after its decodes, into their tokens' rows of `out`."""
    chunks, places = plan_chunks(step), places_of(states)
    heads, dk, dv = layer.value_heads, layer.key_dim, layer.value_dim
    config = config or choose(chunks.num_rows * heads, dv)
    skipped = chunks.skipped
    tokens = step.num_tokens - skipped
    mixed = convolve(projected, layer, states, step)
    values = projected.new_empty(tokens, heads, dv)
    keys = projected.new_empty(tokens, heads, dk)
    scores = projected.new_empty(tokens, heads, CHUNK)
    totals = projected.new_empty(tokens, heads, dtype=torch.float32)
    shape = {"KEY_HEADS": layer.key_heads, "VALUE_HEADS": heads, "DK": dk, "DV": dv, "CHUNK": CHUNK}
    precision = input_precision(projected.dtype)
    _solve[(len(chunks.rows), heads)](
        mixed, projected, projected.stride(0), layer.decay, layer.dt_bias, values, keys, scores, totals,
        *places[4:8], *tables_of(step), step.query_starts, step.context_lens, chunks.rows, chunks.begins, skipped,
        **shape, SLOTS=places.slots, PIECE=places.piece, PRECISION=precision,
        SOLVE="ieee" if precision == "ieee" else config.solve_precision, LEAF=config.solve_leaf,
        num_warps=config.solve_warps, **pdl(),
    )  # fmt: skip
    raw = values  # each program of the scan has read its part of a chunk before it writes the outputs there
    _scan[(chunks.num_rows * heads * (dv // config.scan_values),)](
        mixed, values, keys, scores, totals, raw, *places[:4], *tables_of(step), step.query_starts,
        step.context_lens, chunks.first_row, skipped, **shape, BV=config.scan_values, STAGES=config.scan_stages,
        PRECISION=precision, num_warps=config.scan_warps, **pdl(),
    )  # fmt: skip
    norm_gate(raw, projected[skipped:, layer.channels :], layer.norm, layer.eps, out[skipped:])


def choose(programs: int, value_dim: int) -> DeltaNetConfig:
    """The shapes for this many pairs of row and head."""
    if programs < 2 * num_sms():
        return DeltaNetConfig(scan_values=min(32, value_dim), scan_stages=3)
    return DeltaNetConfig(scan_values=min(64, value_dim))


def is_supported(layer: DeltaNet) -> bool:
    """Whether these kernels take the layer's shapes."""
    sizes = (layer.key_dim, layer.value_dim)
    return all(size >= 16 and size & (size - 1) == 0 for size in sizes) and len(layer.conv) <= MAX_TAPS
