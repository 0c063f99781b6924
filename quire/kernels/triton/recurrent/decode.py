"""Decodes: convolution, gates, update of the state and output in one kernel, states read and written in place.

A program takes one row and one head, with its state [key_dim, value_dim] in registers. Bytes: each state once in and
once out (2 x 64 KiB a head of a gated delta net with 128 x 128); all else is a few hundred bytes. Heads that share
channels of the convolution compute them each for itself; one of them writes the inputs to the ring, into a slot that
none of them reads in this step (`states.py`).

Rows that verify drafts have a few tokens, one after the other, by the same arithmetic; their states are read only. The
last inputs of the convolution are in registers, and a token's are loaded while the one before it is computed. An
update of either kind of layer is S <- kept S + key x delta: key, delta and kept of each token and the inputs of the
convolution are kept for `commit.py`.

States, tables and rings are loaded before `gdc_wait`: the kernel before this one, the input product, does not touch
them, and those that did have long ended.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from quire.kernels.states import DeltaNet, Mamba2, States, StepRows
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, num_sms, pdl
from quire.kernels.triton.recurrent.commit import commit_later, keep_update
from quire.kernels.triton.recurrent.common import (
    convolved,
    from_ring,
    keep_inputs,
    past,
    places_of,
    power_of_two,
    ring_at,
    silu,
    softplus,
    state_at,
    table_of,
    tables_of,
    with_token,
)


@dataclass(frozen=True)
class DecodeConfig:
    """Threads of a program, and registers of each.

    Fewer registers than the compiler would take let several programs share a multiprocessor, so that one loads while
    another computes.
    """

    warps: int
    registers: int

    @property
    def options(self) -> dict[str, int]:
        """Of a launch."""
        return {"num_warps": self.warps, "maxnreg": self.registers}


def rows_of(step: StepRows) -> tuple[int, bool]:
    """(how many rows, from the first, take these kernels; whether each of them has one token).

    Those that verify drafts, or the decodes; all rows if none has more than one token.
    """
    if step.num_verifying:
        return step.num_verifying, False
    if step.num_decodes < step.num_rows and step.max_query_len <= 1:
        return step.num_rows, False
    return step.num_decodes, True


DELTA_NET, MAMBA2 = DecodeConfig(8, 128), DecodeConfig(4, 128)
"""Two programs of a multiprocessor hold 128 KiB of a delta net's states at once, four as much of Mamba 2's."""
DRAFTS_REGISTERS = 192
"""What rows that verify drafts take without spills, if each program can have a multiprocessor for itself."""


def _choose(plain: DecodeConfig, single: bool, programs: int) -> DecodeConfig:
    """Rows that verify drafts have the warps of plain decodes: the order of sums depends on them."""
    return plain if single or programs > num_sms() else replace(plain, registers=DRAFTS_REGISTERS)


@triton.jit
def _delta_net_decode(
    projected, projected_stride, conv, decay, dt_bias, norm, out, updates, raw,
    state, state_pages, state_offsets, state_stride, ring, ring_pages, ring_offsets, ring_stride,
    tables, table_stride, rows, query_starts, context_lens, scale, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    KB: tl.constexpr, VB: tl.constexpr, SLOTS: tl.constexpr, PIECE: tl.constexpr, TAPS: tl.constexpr,
    SINGLE: tl.constexpr, STORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SINGLE: each row has one token. STORE: states are stored. updates, raw: see `Kept`; None: nothing is kept."""
    REPEAT: tl.constexpr = VALUE_HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    SIZE: tl.constexpr = projected.dtype.element_ty.primitive_bitwidth // 8
    program = tl.program_id(0)
    row, head = program // VALUE_HEADS, program % VALUE_HEADS
    key_head = head // REPEAT
    k_lane, v_lane = tl.arange(0, KB), tl.arange(0, VB)
    k_inside, v_inside = k_lane < DK, v_lane < DV
    # q and k as one tensor: the compiler would let every thread compute vectors along the state's rows.
    pair = tl.arange(0, 2)[:, None]
    k_channel = pair * (KEY_HEADS * DK) + key_head * DK + k_lane[None, :]
    pair_inside = k_inside[None, :] & (pair < 2)
    v_channel = 2 * KEY_HEADS * DK + head * DV + v_lane

    # A step's first kernel writes these; the product before this kernel comes after it.
    first = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first
    begin = tl.load(context_lens + row) - count
    table = table_of(tables, table_stride, rows, row)
    at = state_at(state, state_pages, state_offsets, state_stride, table, head)
    tile = at + k_lane[:, None] * DV + v_lane[None, :]
    tile_inside = k_inside[:, None] & v_inside[None, :]
    S = tl.load(tile, mask=tile_inside & (begin > 0), other=0.0)
    k_at = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, k_channel, pair_inside, PIECE, SIZE)
    v_at = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, v_channel, v_inside, PIECE, SIZE)
    if SINGLE:
        qk_before = from_ring(k_at, conv, None, k_channel, CHANNELS, pair_inside, begin, SLOTS, PIECE, TAPS)
        v_before = from_ring(v_at, conv, None, v_channel, CHANNELS, v_inside, begin, SLOTS, PIECE, TAPS)
        own = conv + (TAPS - 1) * CHANNELS
        qk_own = tl.load(own + k_channel, mask=pair_inside, other=0.0).to(tl.float32)
        v_own = tl.load(own + v_channel, mask=v_inside, other=0.0).to(tl.float32)
    else:
        qk_own = tl.load(conv + (TAPS - 1) * CHANNELS + k_channel, mask=pair_inside, other=0.0).to(tl.float32)
        v_own = tl.load(conv + (TAPS - 1) * CHANNELS + v_channel, mask=v_inside, other=0.0).to(tl.float32)
        qk3, qk_w3 = past(k_at, conv, k_channel, CHANNELS, pair_inside, begin, 3, SLOTS, PIECE, TAPS)
        qk2, qk_w2 = past(k_at, conv, k_channel, CHANNELS, pair_inside, begin, 2, SLOTS, PIECE, TAPS)
        qk1, qk_w1 = past(k_at, conv, k_channel, CHANNELS, pair_inside, begin, 1, SLOTS, PIECE, TAPS)
        v3, v_w3 = past(v_at, conv, v_channel, CHANNELS, v_inside, begin, 3, SLOTS, PIECE, TAPS)
        v2, v_w2 = past(v_at, conv, v_channel, CHANNELS, v_inside, begin, 2, SLOTS, PIECE, TAPS)
        v1, v_w1 = past(v_at, conv, v_channel, CHANNELS, v_inside, begin, 1, SLOTS, PIECE, TAPS)
    rate, step_bias = tl.load(decay + head), tl.load(dt_bias + head)
    gain = tl.load(norm + v_lane, mask=v_inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    inputs = projected + first.to(tl.int64) * projected_stride
    result = out + first.to(tl.int64) * (VALUE_HEADS * DV) + head * DV + v_lane
    if begin < 0:  # padding: no state, and outputs that disturb nothing
        for place in range(count):
            tl.store(result + place * (VALUE_HEADS * DV), tl.zeros((VB,), tl.float32), mask=v_inside)
    else:
        if not SINGLE:
            next_qk = tl.load(inputs + k_channel, mask=pair_inside & (count > 0), other=0.0)
            next_v = tl.load(inputs + v_channel, mask=v_inside & (count > 0), other=0.0)
        for place in range(1 if SINGLE else count):
            if SINGLE:
                qk = with_token(qk_before, inputs, qk_own, k_channel, pair_inside)
                v = with_token(v_before, inputs, v_own, v_channel, v_inside)
            else:
                qk_x, v_x = next_qk, next_v
                following = inputs + (place + 1) * projected_stride
                next_qk = tl.load(following + k_channel, mask=pair_inside & (place + 1 < count), other=0.0)
                next_v = tl.load(following + v_channel, mask=v_inside & (place + 1 < count), other=0.0)
                if raw is not None:
                    line = raw + (first + place).to(tl.int64) * CHANNELS
                    tl.store(line + v_channel, v_x, mask=v_inside)
                    if head % REPEAT == 0:
                        tl.store(line + k_channel, qk_x, mask=pair_inside)
                qk_new, v_new = qk_x.to(tl.float32), v_x.to(tl.float32)
                qk = convolved(0.0, qk3, qk_w3, qk2, qk_w2, qk1, qk_w1, qk_new, qk_own, TAPS)
                v = convolved(0.0, v3, v_w3, v2, v_w2, v1, v_w1, v_new, v_own, TAPS)
                qk3, qk2, qk1 = qk2, qk1, qk_new
                v3, v2, v1 = v2, v1, v_new
            qk *= tl.rsqrt(tl.sum(qk * qk, axis=1) + 1e-6)[:, None]
            q = tl.sum(tl.where(pair == 0, qk, 0.0), axis=0) * scale
            k = tl.sum(tl.where(pair == 1, qk, 0.0), axis=0)
            token = inputs + place * projected_stride + CHANNELS
            z = tl.load(token + head * DV + v_lane, mask=v_inside, other=0.0).to(tl.float32)
            b = tl.load(token + VALUE_HEADS * DV + head).to(tl.float32)
            a = tl.load(token + VALUE_HEADS * DV + VALUE_HEADS + head).to(tl.float32)
            kept = tl.exp(rate * softplus(a + step_bias))
            beta = 1.0 / (1.0 + tl.exp(-b))
            # Both products are with the state before the update, so neither waits for the other.
            predicted = tl.sum(S * k[:, None], axis=0) * kept
            carried = tl.sum(S * q[:, None], axis=0) * kept
            delta = beta * (v - predicted)
            y = carried + delta * tl.sum(q * k)
            S = tl.fma(S, kept, k[:, None] * delta[None, :])
            if updates is not None:
                update = updates + (first + place).to(tl.int64) * (KEY_HEADS * DK + VALUE_HEADS * (DV + 1))
                keep_update(
                    update, k, delta, kept, key_head * DK + k_lane, k_inside,
                    KEY_HEADS * DK + head * DV + v_lane, v_inside,
                    KEY_HEADS * DK + VALUE_HEADS * DV + head, head % REPEAT == 0,
                )  # fmt: skip
            y = tl.where(v_inside, y, 0.0)
            y = y * tl.rsqrt(tl.sum(y * y) / DV + eps) * gain * silu(z)
            tl.store(result + place * (VALUE_HEADS * DV), y, mask=v_inside)
        if STORE:
            tl.store(tile, S, mask=tile_inside)
            keep_inputs(inputs, projected_stride, v_at, v_channel, v_inside, begin, count, SLOTS, PIECE)
            if head % REPEAT == 0:
                keep_inputs(inputs, projected_stride, k_at, k_channel, pair_inside, begin, count, SLOTS, PIECE)


def delta_net_decode(
    projected: torch.Tensor,
    layer: DeltaNet,
    states: States,
    step: StepRows,
    out: torch.Tensor,
    num_rows: int,
    single: bool = True,
    config: DecodeConfig | None = None,
) -> None:
    """Rows 0 to num_rows of a step, into their tokens' rows of `out`. `single`: each row has one token.

    If the step verifies drafts, states are not stored: what `StateReplay` needs is kept.
    """
    places, config = places_of(states), config or _choose(DELTA_NET, single, num_rows * layer.value_heads)
    kept = commit_later(projected, layer, states, step)
    _delta_net_decode[(num_rows * layer.value_heads,)](
        projected, projected.stride(0), layer.conv, layer.decay, layer.dt_bias, layer.norm, out, *kept,
        *places[:8], *tables_of(step), step.query_starts, step.context_lens, layer.key_dim**-0.5, layer.eps,
        KEY_HEADS=layer.key_heads, VALUE_HEADS=layer.value_heads, DK=layer.key_dim, DV=layer.value_dim,
        KB=power_of_two(layer.key_dim), VB=power_of_two(layer.value_dim), SLOTS=places.slots, PIECE=places.piece,
        TAPS=len(layer.conv), SINGLE=single, STORE=not step.num_verifying, **config.options, **pdl(),
    )  # fmt: skip


@triton.jit
def _mamba2_decode(
    projected, projected_stride, conv, bias, decay, dt_bias, skip, out, updates, raw,
    state, state_pages, state_offsets, state_stride, ring, ring_pages, ring_offsets, ring_stride,
    tables, table_stride, rows, query_starts, context_lens, dt_low, dt_high,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    DB: tl.constexpr, SB: tl.constexpr, SLOTS: tl.constexpr, PIECE: tl.constexpr, TAPS: tl.constexpr,
    SINGLE: tl.constexpr, STORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_delta_net_decode`."""
    SHARE: tl.constexpr = HEADS // GROUPS
    INNER: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE
    SIZE: tl.constexpr = projected.dtype.element_ty.primitive_bitwidth // 8
    program = tl.program_id(0)
    row, head = program // HEADS, program % HEADS
    group = head // SHARE
    s_lane, d_lane = tl.arange(0, SB), tl.arange(0, DB)
    s_inside, d_inside = s_lane < STATE, d_lane < DIM
    x_channel = head * DIM + d_lane
    pair = tl.arange(0, 2)[:, None]  # B, C
    s_channel = INNER + pair * (GROUPS * STATE) + group * STATE + s_lane[None, :]
    pair_inside = s_inside[None, :] & (pair < 2)

    first = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first
    begin = tl.load(context_lens + row) - count
    table = table_of(tables, table_stride, rows, row)
    at = state_at(state, state_pages, state_offsets, state_stride, table, head)
    tile = at + s_lane[:, None] * DIM + d_lane[None, :]
    tile_inside = s_inside[:, None] & d_inside[None, :]
    S = tl.load(tile, mask=tile_inside & (begin > 0), other=0.0)
    x_at = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, x_channel, d_inside, PIECE, SIZE)
    s_at = ring_at(ring, ring_pages, ring_offsets, ring_stride, table, s_channel, pair_inside, PIECE, SIZE)
    if SINGLE:
        bc_before = from_ring(s_at, conv, bias, s_channel, CHANNELS, pair_inside, begin, SLOTS, PIECE, TAPS)
        x_before = from_ring(x_at, conv, bias, x_channel, CHANNELS, d_inside, begin, SLOTS, PIECE, TAPS)
        own = conv + (TAPS - 1) * CHANNELS
        bc_own = tl.load(own + s_channel, mask=pair_inside, other=0.0).to(tl.float32)
        x_own = tl.load(own + x_channel, mask=d_inside, other=0.0).to(tl.float32)
    else:
        bc_own = tl.load(conv + (TAPS - 1) * CHANNELS + s_channel, mask=pair_inside, other=0.0).to(tl.float32)
        x_own = tl.load(conv + (TAPS - 1) * CHANNELS + x_channel, mask=d_inside, other=0.0).to(tl.float32)
        bc3, bc_w3 = past(s_at, conv, s_channel, CHANNELS, pair_inside, begin, 3, SLOTS, PIECE, TAPS)
        bc2, bc_w2 = past(s_at, conv, s_channel, CHANNELS, pair_inside, begin, 2, SLOTS, PIECE, TAPS)
        bc1, bc_w1 = past(s_at, conv, s_channel, CHANNELS, pair_inside, begin, 1, SLOTS, PIECE, TAPS)
        x3, x_w3 = past(x_at, conv, x_channel, CHANNELS, d_inside, begin, 3, SLOTS, PIECE, TAPS)
        x2, x_w2 = past(x_at, conv, x_channel, CHANNELS, d_inside, begin, 2, SLOTS, PIECE, TAPS)
        x1, x_w1 = past(x_at, conv, x_channel, CHANNELS, d_inside, begin, 1, SLOTS, PIECE, TAPS)
        bc_bias, x_bias = 0.0, 0.0
        if bias is not None:
            bc_bias = tl.load(bias + s_channel, mask=pair_inside, other=0.0).to(tl.float32)
            x_bias = tl.load(bias + x_channel, mask=d_inside, other=0.0).to(tl.float32)
    rate, step_bias, through = tl.load(decay + head), tl.load(dt_bias + head), tl.load(skip + head)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    inputs = projected + first.to(tl.int64) * projected_stride + INNER
    result = out + first.to(tl.int64) * INNER + head * DIM + d_lane
    if begin < 0:  # padding
        for place in range(count):
            tl.store(result + place * INNER, tl.zeros((DB,), tl.float32), mask=d_inside)
    else:
        if not SINGLE:
            next_bc = tl.load(inputs + s_channel, mask=pair_inside & (count > 0), other=0.0)
            next_x = tl.load(inputs + x_channel, mask=d_inside & (count > 0), other=0.0)
        for place in range(1 if SINGLE else count):
            if SINGLE:
                x = with_token(x_before, inputs, x_own, x_channel, d_inside)
                bc = with_token(bc_before, inputs, bc_own, s_channel, pair_inside)
            else:
                bc_in, x_in = next_bc, next_x
                following = inputs + (place + 1) * projected_stride
                next_bc = tl.load(following + s_channel, mask=pair_inside & (place + 1 < count), other=0.0)
                next_x = tl.load(following + x_channel, mask=d_inside & (place + 1 < count), other=0.0)
                if raw is not None:
                    line = raw + (first + place).to(tl.int64) * CHANNELS
                    tl.store(line + x_channel, x_in, mask=d_inside)
                    if head % SHARE == 0:
                        tl.store(line + s_channel, bc_in, mask=pair_inside)
                bc_new, x_new = bc_in.to(tl.float32), x_in.to(tl.float32)
                bc = convolved(bc_bias, bc3, bc_w3, bc2, bc_w2, bc1, bc_w1, bc_new, bc_own, TAPS)
                x = convolved(x_bias, x3, x_w3, x2, x_w2, x1, x_w1, x_new, x_own, TAPS)
                bc3, bc2, bc1 = bc2, bc1, bc_new
                x3, x2, x1 = x2, x1, x_new
            b = tl.sum(tl.where(pair == 0, bc, 0.0), axis=0)
            c = tl.sum(tl.where(pair == 1, bc, 0.0), axis=0)
            dt = softplus(tl.load(inputs + place * projected_stride + CHANNELS + head).to(tl.float32) + step_bias)
            dt = tl.minimum(tl.maximum(dt, dt_low), dt_high)
            kept = tl.exp(rate * dt)
            # As multiply-adds by name: which product the compiler fuses may differ between this kernel's variants.
            y = tl.fma(x, tl.fma(dt, tl.sum(b * c), through), tl.sum(S * c[:, None], axis=0) * kept)
            delta = x * dt
            S = tl.fma(S, kept, b[:, None] * delta[None, :])
            if updates is not None:
                update = updates + (first + place).to(tl.int64) * (GROUPS * STATE + HEADS * (DIM + 1))
                keep_update(
                    update, b, delta, kept, group * STATE + s_lane, s_inside,
                    GROUPS * STATE + head * DIM + d_lane, d_inside,
                    GROUPS * STATE + HEADS * DIM + head, head % SHARE == 0,
                )  # fmt: skip
            tl.store(result + place * INNER, y, mask=d_inside)
        if STORE:
            tl.store(tile, S, mask=tile_inside)
            keep_inputs(inputs, projected_stride, x_at, x_channel, d_inside, begin, count, SLOTS, PIECE)
            if head % SHARE == 0:
                keep_inputs(inputs, projected_stride, s_at, s_channel, pair_inside, begin, count, SLOTS, PIECE)


def mamba2_decode(
    projected: torch.Tensor,
    layer: Mamba2,
    states: States,
    step: StepRows,
    out: torch.Tensor,
    num_rows: int,
    single: bool = True,
    config: DecodeConfig | None = None,
) -> None:
    """As `delta_net_decode`."""
    places, config = places_of(states), config or _choose(MAMBA2, single, num_rows * layer.heads)
    kept = commit_later(projected, layer, states, step)
    _mamba2_decode[(num_rows * layer.heads,)](
        projected, projected.stride(0), layer.conv, layer.bias, layer.decay, layer.dt_bias, layer.skip, out, *kept,
        *places[:8], *tables_of(step), step.query_starts, step.context_lens, *layer.dt_limit,
        HEADS=layer.heads, GROUPS=layer.groups, DIM=layer.head_dim, STATE=layer.state_dim,
        DB=power_of_two(layer.head_dim), SB=power_of_two(layer.state_dim), SLOTS=places.slots, PIECE=places.piece,
        TAPS=len(layer.conv), SINGLE=single, STORE=not step.num_verifying, **config.options, **pdl(),
    )  # fmt: skip
