"""What attention kernels do to scores besides masking them: soft caps, biases by distance, sinks in the denominator.

Scores are in units of log2, so that weights are exp2(score - best).
"""

# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)


def score_arguments(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """(what a kernel multiplies products of queries and keys with, its `CAP`; 0: no soft cap)."""
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / soft_cap, soft_cap * LOG2_E


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """cap * tanh(score / cap), of scores multiplied as `score_arguments` says: tanh(x) is 1 - 2 / (1 + e^(2 x))."""
    if CAP > 0:
        scores = CAP - 2 * CAP / (1 + tl.exp2(scores))
    return scores


@triton.jit
def load_logits(logits, head, mask):
    """Sinks or slopes of some query heads, in units of log2."""
    return tl.load(logits + head, mask=mask, other=0.0).to(tl.float32) * _LOG2_E


@triton.jit
def with_sink(weight, best, sink):
    """The sum of weights with the sink's: where it is larger by far, infinity, and the result 0."""
    return weight + tl.exp2(sink - best)
