"""Between the fused QKV GEMM and attention: norm and rotate Q and K, write K and V to the paged cache. One launch.

A program takes one token and a group of adjacent heads, of any role: Q, K and V heads are adjacent in a row of qkv, so
all are loaded alike, and only the store address depends on the role. A head is held as the two halves of its rotated
dimensions, so that a pair is in one thread, and the unrotated rest. Each value is loaded and stored by the same thread,
so Q may overwrite its input. A cache in few bits (`CODES`) gets the codes of the values that would be stored otherwise.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.kv import LayerKV, QuantizedKV
from quire.kernels.triton.kv_codes import code_arguments, encode, finite, token_scale
from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

GROUP_VALUES = 2048
"""Values one program loads: 16 heads of 128 dimensions."""


@triton.jit
def _square(x):
    return x.to(tl.float32) * x.to(tl.float32)


@triton.jit
def _scaled(x, inverse, weight):
    """x * inverse * weight, rounded to x's dtype like a norm's result."""
    return (x.to(tl.float32) * inverse * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _prepare_qkv(
    qkv,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    kv,
    slots,
    scales,
    eps,
    qkv_stride,
    block_stride,
    value_stride,
    head_stride,
    slot_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    CODES: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    GROUPS: tl.constexpr = (HEADS + 2 * KV_HEADS + GROUP - 1) // GROUP
    NORM: tl.constexpr = q_weight is not None
    program = tl.program_id(0)
    token = (program // GROUPS).to(tl.int64)
    head = program % GROUPS * GROUP + tl.arange(0, GROUP)[:, None]
    exists = head < HEADS + 2 * KV_HEADS
    is_q = head < HEADS
    is_v = head >= HEADS + KV_HEADS

    pair = tl.arange(0, HALF_BLOCK)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    in_pair = exists & (pair < HALF)
    in_rest = exists & (rest < HEAD_DIM)
    if NORM:
        weight = tl.where(is_q, q_weight, k_weight)
        if HALF:
            first_weight = tl.load(weight + pair, mask=in_pair & ~is_v, other=0.0)
            second_weight = tl.load(weight + HALF + pair, mask=in_pair & ~is_v, other=0.0)
        if REST:
            rest_weight = tl.load(weight + rest, mask=in_rest & ~is_v, other=0.0)
    else:
        in_rest &= ~is_q  # neither normed nor rotated: already in place

    kv_head = tl.where(is_v, head - HEADS - KV_HEADS, head - HEADS)
    if CODES and not TOKEN_SCALES:
        # The model's, which no kernel writes: not another load to wait for later.
        scale = tl.load(scales + is_v.to(tl.int32) * KV_HEADS + kv_head, mask=exists & ~is_q, other=1.0)

    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    slot = tl.load(slots + token).to(tl.int64)
    q_at = qkv + token * qkv_stride + head * HEAD_DIM
    if HALF:
        position = tl.load(positions + token).to(tl.int64)
        first = tl.load(q_at + pair, mask=in_pair, other=0.0)
        second = tl.load(q_at + HALF + pair, mask=in_pair, other=0.0)
        # Every head loads the angles: a load broadcast to all heads would go through shared memory.
        angles = cos_sin + position * (2 * HALF) + pair + tl.zeros((GROUP, 1), tl.int32)
        cos = tl.load(angles, mask=in_pair & ~is_v, other=0.0)
        sin = tl.load(angles + HALF, mask=in_pair & ~is_v, other=0.0)
    if REST:
        rest_values = tl.load(q_at + rest, mask=in_rest, other=0.0)

    if NORM:
        squares = tl.zeros((GROUP, 1), tl.float32)
        if HALF:
            squares += tl.sum(_square(first) + _square(second), axis=1, keep_dims=True)
        if REST:
            squares += tl.sum(_square(rest_values), axis=1, keep_dims=True)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)
        if HALF:
            first = tl.where(is_v, first, _scaled(first, inverse, first_weight))
            second = tl.where(is_v, second, _scaled(second, inverse, second_weight))
        if REST:
            rest_values = tl.where(is_v, rest_values, _scaled(rest_values, inverse, rest_weight))

    cache_at = (
        kv
        + slot // BLOCK_SIZE * block_stride
        + slot % BLOCK_SIZE * slot_stride
        + is_v.to(tl.int32) * value_stride
        + kv_head * head_stride
    )
    if HALF:
        x, y = first.to(tl.float32), second.to(tl.float32)
        first = tl.where(is_v, first, (x * cos - y * sin).to(first.dtype))
        second = tl.where(is_v, second, (y * cos + x * sin).to(second.dtype))
        tl.store(q_at + pair, first, mask=in_pair & is_q)
        tl.store(q_at + HALF + pair, second, mask=in_pair & is_q)
    if NORM and REST:
        tl.store(q_at + rest, rest_values, mask=in_rest & is_q)
    if CODES:
        if program % GROUPS * GROUP + GROUP > HEADS:  # not only Q heads
            if TOKEN_SCALES:
                largest = tl.zeros((GROUP, 1), tl.float32)
                if HALF:
                    sizes = tl.maximum(tl.abs(finite(first)), tl.abs(finite(second)))
                    largest = tl.maximum(largest, tl.max(sizes, axis=1, keep_dims=True))
                if REST:
                    largest = tl.maximum(largest, tl.max(tl.abs(finite(rest_values)), axis=1, keep_dims=True))
                scale = token_scale(largest, CODES)
                # Codes and scales of a layer have the same order, and their blocks begin as many bytes apart.
                at_scale = (
                    scales
                    + slot // BLOCK_SIZE * (block_stride // 4)
                    + (is_v.to(tl.int32) * KV_HEADS + kv_head) * BLOCK_SIZE
                    + slot % BLOCK_SIZE
                )
                tl.store(at_scale, scale, mask=exists & ~is_q)
            if HALF:
                tl.store(cache_at + pair, encode(first, scale, CODES), mask=in_pair & ~is_q)
                tl.store(cache_at + HALF + pair, encode(second, scale, CODES), mask=in_pair & ~is_q)
            if REST:
                tl.store(cache_at + rest, encode(rest_values, scale, CODES), mask=in_rest & ~is_q)
    else:
        if HALF:
            tl.store(cache_at + pair, first.to(kv.dtype.element_ty), mask=in_pair & ~is_q)
            tl.store(cache_at + HALF + pair, second.to(kv.dtype.element_ty), mask=in_pair & ~is_q)
        if REST:
            tl.store(cache_at + rest, rest_values.to(kv.dtype.element_ty), mask=in_rest & ~is_q)


@functools.cache
def _constants(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, block_size: int
) -> tuple[int, dict[str, Any]]:
    """(programs per token, constexpr arguments and launch options)."""
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    half_block, rest_block = (triton.next_power_of_2(size) if size else 1 for size in (half, rest))
    values = triton.next_power_of_2(2 * half_block * bool(half) + rest_block * bool(rest))
    total = heads + 2 * kv_heads
    group = min(triton.next_power_of_2(total), max(GROUP_VALUES // values, 1))
    return triton.cdiv(total, group), {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "HALF_BLOCK": half_block,
        "REST_BLOCK": rest_block,
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "num_warps": min(max(group * values // 512, 1), 8),
        **pdl(),
    }


def prepare_qkv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    kv: LayerKV,
    slots: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """`Ops.prepare_qkv`; Q overwrites its part of qkv and is returned as a view of it.

    Bytes per token: (heads + 2 * kv_heads) * head_dim values in and as many out, K and V as codes if the cache has
    those, one row of cos_sin (4 * rotary_dim) and 16 of position and slot. Operations: 6 per rotated pair, 4 per value
    where there is a norm, and about 25 per code.
    """
    q_weight, k_weight, eps = (None, None, 0.0) if norms is None else norms
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    tokens = qkv.shape[0]
    stride = qkv.stride(0)
    block_stride, value_stride, head_stride, slot_stride, _ = kv.stride()
    groups, constants = _constants(num_heads, num_kv_heads, head_dim, rotary_dim, kv.shape[3])
    _prepare_qkv[(tokens * groups,)](
        qkv,
        positions,
        cos_sin,
        q_weight,
        k_weight,
        kv.codes if isinstance(kv, QuantizedKV) else kv,
        slots,
        eps=eps,
        qkv_stride=stride,
        block_stride=block_stride,
        value_stride=value_stride,
        head_stride=head_stride,
        slot_stride=slot_stride,
        **code_arguments(kv),
        **constants,
    )
    return qkv.as_strided((tokens, num_heads, head_dim), (stride, head_dim, 1))
