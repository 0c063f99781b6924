"""Between latent attention's projections and its attention: norm the latents, rotate keys and queries, write the cache.

One launch. A program takes one token: its latent and rotated key, or a group of its query heads. Each value is loaded
and stored by the same thread, so all of it happens in place. Bytes: every latent read once and written twice, the
rotated part of every query read and written.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

GROUP = 16
"""Query heads of a program."""


@triton.jit
def _rotate(first_at, second_at, cos, sin, there):
    """Rotate the pairs at these addresses in place; returns them."""
    x = tl.load(first_at, mask=there, other=0.0)
    y = tl.load(second_at, mask=there, other=0.0)
    a, b = x.to(tl.float32), y.to(tl.float32)
    first = (a * cos - b * sin).to(x.dtype)
    second = (b * cos + a * sin).to(y.dtype)
    tl.store(first_at, first, mask=there)
    tl.store(second_at, second, mask=there)
    return first, second


@triton.jit
def _prepare(
    q, latent, positions, cos_sin, gain, cache, slots, eps, stride_token, stride_head, stride_latent, stride_block,
    stride_slot,
    HEADS: tl.constexpr, ROPE_AT: tl.constexpr, RANK: tl.constexpr, RANK_P2: tl.constexpr, HALF: tl.constexpr,
    HALF_P2: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    program = tl.program_id(0)
    token = (program // (GROUPS + 1)).to(tl.int64)
    part = program % (GROUPS + 1)
    pair = tl.arange(0, HALF_P2)[None, :]
    if INTERLEAVED:
        first_at = 2 * pair
        second_at = first_at + 1
    else:
        first_at = pair
        second_at = pair + HALF
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_sin + position * (2 * HALF) + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + pair, mask=pair < HALF, other=0.0)
    if part == GROUPS:
        slot = tl.load(slots + token).to(tl.int64)
        entry = cache + slot // BLOCK * stride_block + slot % BLOCK * stride_slot
        own = latent + token * stride_latent
        d = tl.arange(0, RANK_P2)
        x = tl.load(own + d, mask=d < RANK, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
        weight = tl.load(gain + d, mask=d < RANK, other=0.0).to(tl.float32)
        normed = (x * inverse * weight).to(latent.dtype.element_ty)
        tl.store(own + d, normed, mask=d < RANK)
        tl.store(entry + d, normed, mask=d < RANK)
        first, second = _rotate(own + RANK + first_at, own + RANK + second_at, cos, sin, pair < HALF)
        tl.store(entry + RANK + first_at, first, mask=pair < HALF)
        tl.store(entry + RANK + second_at, second, mask=pair < HALF)
    else:
        head = part * GROUP + tl.arange(0, GROUP)[:, None]
        line = q + token * stride_token + head * stride_head + ROPE_AT
        _rotate(line + first_at, line + second_at, cos, sin, (head < HEADS) & (pair < HALF))


def prepare_latent(
    q: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, gain: torch.Tensor,
    eps: float, cache: torch.Tensor, slots: torch.Tensor, interleaved: bool,
) -> None:  # fmt: skip
    """See `Ops.prepare_latent`."""
    tokens, heads, dim = q.shape
    rank, rope = len(gain), cos_sin.shape[1]
    groups = triton.cdiv(heads, GROUP)
    _prepare[(tokens * (groups + 1),)](
        q, latent, positions, cos_sin, gain, cache, slots, eps, q.stride(0), q.stride(1), latent.stride(0),
        cache.stride(0), cache.stride(1),
        HEADS=heads, ROPE_AT=dim - rope, RANK=rank, RANK_P2=triton.next_power_of_2(rank), HALF=rope // 2,
        HALF_P2=triton.next_power_of_2(rope // 2), BLOCK=cache.shape[1], INTERLEAVED=interleaved, GROUP=GROUP,
        num_warps=4, **pdl(),
    )  # fmt: skip
