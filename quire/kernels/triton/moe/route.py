"""Routing: the top-k experts of each token and their weights, one warp per token.

Bytes: the logits once, 8 per choice. Operations: about 10 per logit and choice. A token's routing does not depend on
its batch.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.routing import RouteRule
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


@triton.jit
def _best_groups(choice, lane, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
                 GROUP_TOP: tl.constexpr, GROUP_SLOTS: tl.constexpr):  # fmt: skip
    """`choice` with -inf for experts outside of the best groups; a group's quality is the sum of its best."""
    SIZE: tl.constexpr = E // GROUPS
    place = tl.arange(0, GROUP_SLOTS)[None, :]
    quality = tl.full((choice.shape[0], GROUP_SLOTS), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = tl.where(lane // SIZE == group, choice, float("-inf"))
        high = tl.max(own, 1)[:, None]
        if GROUP_TOP == 2:
            keys = _sort_keys(own, lane, E)
            own = tl.where(keys == tl.max(keys, 1)[:, None], float("-inf"), own)
            high += tl.max(own, 1)[:, None]
        quality = tl.where(place == group, high, quality)
    keys = _sort_keys(quality, place, GROUPS)
    kept = lane < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(keys, 1)[:, None]
        kept |= lane // SIZE == _expert_of(best)
        keys = tl.where(keys == best, TAKEN, keys)
    return tl.where(kept, choice, float("-inf"))


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits, weights, experts, counts, slots, bias, tokens, stride, scale,
    E: tl.constexpr, TOP: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    SLOTS: tl.constexpr, RULED: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr, GROUP_SLOTS: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
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
    largest = tl.max(values, 1)[:, None]
    chosen = tl.zeros((ROWS, SLOTS), tl.int32)
    if RULED:
        choice = values
        if SIGMOID:
            scores = 1.0 / (1.0 + tl.exp(-values))
            choice = scores
        else:
            scores = tl.exp(values - largest)
            scores /= tl.sum(scores, 1)[:, None]
        if bias is not None:
            choice = scores + tl.load(bias + lane, mask=lane < E, other=0.0)
        elif GROUP_TOP == 2:
            choice = scores
        if GROUPS > 1:
            choice = _best_groups(choice, lane, E, GROUPS, TOP_GROUPS, GROUP_TOP, GROUP_SLOTS)
        keys = _sort_keys(choice, lane, E)
        share = tl.zeros((ROWS, SLOTS), tl.float32)
        for rank in tl.static_range(TOP):
            best = tl.max(keys, 1)[:, None]
            own = keys == best
            chosen = tl.where(slot == rank, _expert_of(best), chosen)
            share = tl.where(slot == rank, tl.sum(tl.where(own, scores, 0.0), 1)[:, None], share)
            keys = tl.where(own, TAKEN, keys)
        if RENORMALISE:
            share /= tl.sum(share, 1)[:, None] + 1e-20
        share *= scale
        shared = (slot >= TOP) & (slot < TOP + SHARED)
        chosen = tl.where(shared, E + slot - TOP, chosen)
        if GATED:
            gates = logits + row.to(tl.int64)[:, None] * stride + E + slot - TOP
            gate = tl.load(gates, mask=inside & shared, other=0.0).to(tl.float32)
            share = tl.where(shared, 1.0 / (1.0 + tl.exp(-gate)), share)
        else:
            share = tl.where(shared, 1.0, share)
    else:
        keys = _sort_keys(values, lane, E)
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
    stored = inside & (slot < TOP + SHARED)
    real = stored
    if slots is not None:
        real &= (tl.load(slots + row, mask=row < tokens, other=0) != 0)[:, None]
    index = row[:, None] * (TOP + SHARED) + slot
    tl.store(weights + index, share, mask=stored)
    tl.store(experts + index, tl.where(real, chosen, -1), mask=stored)
    if counts is not None:
        tl.atomic_add(counts + chosen, tl.full((ROWS, SLOTS), 1, tl.int64), mask=real & (slot < TOP), sem="relaxed")


def route(
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool,
    counts: torch.Tensor | None,
    slots: torch.Tensor | None = None,
    rule: RouteRule | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [tokens, top_k] float32, experts [tokens, top_k] int32) of logits [tokens, experts]; see `Ops.route`."""
    tokens, experts = logits.shape
    bias, scale, shared = (None, 1.0, 0) if rule is None else (rule.bias, rule.scale, rule.shared)
    experts -= 0 if rule is None else rule.gates
    weights = logits.new_empty((tokens, top_k + shared), dtype=torch.float32)
    chosen = logits.new_empty((tokens, top_k + shared), dtype=torch.int32)
    _route[(triton.cdiv(tokens, ROWS),)](
        logits, weights, chosen, counts, slots, bias, tokens, logits.stride(0), scale,
        **_constants(experts, top_k, renormalise, rule),
    )  # fmt: skip
    return weights, chosen


@functools.cache
def _constants(experts: int, top_k: int, renormalise: bool, rule: RouteRule | None) -> dict[str, Any]:
    """Constexpr arguments and launch options."""
    plain = rule or RouteRule()
    return {
        "E": experts,
        "TOP": top_k,
        "RENORMALISE": renormalise,
        "ROWS": ROWS,
        "LANES": triton.next_power_of_2(experts),
        "SLOTS": triton.next_power_of_2(top_k + plain.shared),
        "RULED": rule is not None,
        "SIGMOID": plain.sigmoid,
        "GROUPS": plain.groups,
        "TOP_GROUPS": plain.top_groups,
        "GROUP_TOP": plain.group_top,
        "GROUP_SLOTS": triton.next_power_of_2(plain.groups),
        "SHARED": plain.shared,
        "GATED": plain.gated,
        "num_warps": 4,
        **pdl(),
    }
