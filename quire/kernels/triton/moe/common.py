"""What the kernels of mixtures of experts share: how a call is configured, and in which order experts are taken."""

# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl


class Block(NamedTuple):
    """The shape of one product's programs."""

    n: int
    """Outputs of a program (under the gate: gate features, and as many gated ones)."""
    k: int = 0
    """Inputs of one step of the loop (`tile`)."""
    warps: int = 4
    stages: int = 0
    """Steps of the loop whose reads are under way (`tile`)."""


@dataclass(frozen=True)
class ExpertsConfig:
    """How tokens go through their experts: a kernel, and the shapes of its programs."""

    kernel: str
    """`vector`: each pair of a token and an expert by itself; `tile`: the tokens of an expert together."""
    gate_up: Block
    down: Block
    block_m: int = 0
    """Pairs of a program (`tile`)."""
    tma: bool = False
    """Whether the copy engine reads the weights, rather than the threads (`tile`)."""


class ExpertsShape(NamedTuple):
    """The experts of a layer."""

    experts: int
    top_k: int
    width: int
    hidden: int


TAKEN = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""A sort key below all others."""


@triton.jit
def sort_keys(values, lane, E: tl.constexpr):
    """Integers in the order in which experts are chosen: by their logits, the lower index first among equals.

    NaN counts as the largest, and lanes past the last expert come last: whatever the logits are, what is chosen exists.
    """
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)  # the two zeros are equal
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(values == values, bits, 0x7FFFFFFF)
    return tl.where(lane < E, (bits.to(tl.int64) << 32) + (0x7FFFFFFF - lane), TAKEN)


@triton.jit
def expert_of(key):
    """The expert whose sort key this is."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def logit_of(key):
    """The logit from which a sort key was made."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
