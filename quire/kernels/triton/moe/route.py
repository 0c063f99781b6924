"""Routing: the top-k experts of each token and their softmax weights, one warp per token.

Bytes: the logits once, 8 per choice. Operations: about 10 per logit and choice. A token's routing does not depend on
its batch.
"""

# ruff: noqa: N803

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import gdc_launch_dependents, gdc_wait, pdl

ROWS = 4
"""Tokens of a program: one per warp."""
MAX_EXPERTS = 1024
TAKEN = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""A sort key below all others: of an expert already chosen."""


@triton.jit
def _sort_keys(values, lane, E: tl.constexpr):
    """Integers in the order in which experts are chosen: by logit, among equals the lower index first.

    NaN counts as the largest, and lanes past the last expert come last, so the chosen index is in range for any logits.
    """
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)  # the two zeros are equal
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(values == values, bits, 0x7FFFFFFF)
    return tl.where(lane < E, (bits.to(tl.int64) << 32) + (0x7FFFFFFF - lane), TAKEN)


@triton.jit
def _expert_of(key):
    """The expert whose sort key this is."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _logit_of(key):
    """The logit of a sort key."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits, weights, experts, counts, slots, tokens, stride,
    E: tl.constexpr, TOP: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    inside = (row < tokens)[:, None]
    at = logits + row.to(tl.int64)[:, None] * stride + lane
    values = tl.load(at, mask=inside & (lane < E), other=float("-inf")).to(tl.float32)
    keys = _sort_keys(values, lane, E)
    largest = tl.max(values, 1)[:, None]
    chosen = tl.zeros((ROWS, SLOTS), tl.int32)
    logit = tl.full((ROWS, SLOTS), float("-inf"), tl.float32)
    for rank in tl.static_range(TOP):
        best = tl.max(keys, 1)[:, None]
        chosen = tl.where(slot == rank, _expert_of(best), chosen)
        logit = tl.where(slot == rank, _logit_of(best), logit)
        keys = tl.where(keys == best, TAKEN, keys)
    share = tl.exp(logit - largest)
    if RENORMALISE:
        share /= tl.sum(share, 1)[:, None]
    else:
        share /= tl.sum(tl.exp(values - largest), 1)[:, None]
    stored = inside & (slot < TOP)
    real = stored
    if slots is not None:
        real &= (tl.load(slots + row, mask=row < tokens, other=0) != 0)[:, None]
    index = row[:, None] * TOP + slot
    tl.store(weights + index, share, mask=stored)
    tl.store(experts + index, tl.where(real, chosen, -1), mask=stored)
    if counts is not None:
        tl.atomic_add(counts + chosen, tl.full((ROWS, SLOTS), 1, tl.int64), mask=real, sem="relaxed")


def route(
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool,
    counts: torch.Tensor | None,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [tokens, top_k] float32, experts [tokens, top_k] int32) of logits [tokens, experts]; see `Ops.route`."""
    tokens, experts = logits.shape
    weights = logits.new_empty((tokens, top_k), dtype=torch.float32)
    chosen = logits.new_empty((tokens, top_k), dtype=torch.int32)
    _route[(triton.cdiv(tokens, ROWS),)](
        logits, weights, chosen, counts, slots, tokens, logits.stride(0), **_constants(experts, top_k, renormalise)
    )
    return weights, chosen


@functools.cache
def _constants(experts: int, top_k: int, renormalise: bool) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    return {
        "E": experts,
        "TOP": top_k,
        "RENORMALISE": renormalise,
        "ROWS": ROWS,
        "LANES": triton.next_power_of_2(experts),
        "SLOTS": triton.next_power_of_2(top_k),
        "num_warps": 4,
        **pdl(),
    }
