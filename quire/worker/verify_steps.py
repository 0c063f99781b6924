"""Decodes that verify drafts, padded to one of a few shapes, so that they can be CUDA graphs.

A graph fixes the numbers of rows and of tokens; which row has how many of them is in a buffer. So a plan's rows are
padded to a capture size, and its drafts to one of a few numbers. Added rows are the batch's padding row, which is never
active; each has a token, and the last one takes the padding drafts. A padded plan is a plan like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from quire.messages.plan import MAX_WIDTH, StepPlan

NARROW = 4
"""Attention has one kernel for rows of up to this many tokens, and one for more."""


class VerifyShape(NamedTuple):
    """The key of a captured decode that verifies drafts."""

    rows: int
    drafts: int
    width: int
    """Most tokens of a row that attention takes: NARROW or MAX_WIDTH."""
    proposals: int
    """Drafts that the proposer on the device makes for each row."""
    adapted: bool = False
    """Whether rows may have LoRA adapters."""

    @property
    def tokens(self) -> int:
        return self.rows + self.drafts


def padded_drafts(count: int) -> int:
    """The number of drafts that `count` are padded to: at most a quarter more, and none for few of them."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


def verify_shape(
    plan: StepPlan, size_of: Sequence[int], most_rows: int, proposals: int, adapted: bool = False
) -> VerifyShape | None:
    """The shape that a decode with drafts is padded to; None if the plan is no such decode, or has too many rows.

    size_of    by number of rows, the capture size they run at
    most_rows  of the batch: one more fits, the padding row
    """
    rows = len(plan.rows)
    if not plan.num_drafts or rows != plan.num_decodes or plan.forks or len(plan.samples) != rows:
        return None
    if not 0 < rows < len(size_of) or (plan.samples != np.arange(rows)).any():
        return None
    drafts = padded_drafts(plan.num_drafts)
    wanted = rows + (drafts > plan.num_drafts)
    padded = size_of[wanted] if wanted < len(size_of) else most_rows + 1
    width = NARROW if plan.counts.max() <= NARROW else MAX_WIDTH
    return VerifyShape(padded, drafts, width, proposals, adapted)


def smallest_above(plan: StepPlan, shape: VerifyShape, others: Iterable[VerifyShape]) -> VerifyShape | None:
    """Of other shapes the one with the fewest tokens that the plan can be padded to; None if all are too small, or have
    more than twice the tokens of its own shape."""
    fitting = [
        other
        for other in others
        if other.drafts >= plan.num_drafts and other.rows >= len(plan.rows) + (other.drafts > plan.num_drafts)
        and other.width >= shape.width and other[3:] == shape[3:] and other.tokens <= 2 * shape.tokens
    ]  # fmt: skip
    return min(fitting, key=lambda other: other.tokens, default=None)


def pad_verifying(plan: StepPlan, shape: VerifyShape, pad_row: int) -> StepPlan:
    """The plan with padding rows, so that it has the shape."""
    added = shape.rows - len(plan.rows)
    if not added:
        return plan
    counts = np.ones(added, np.int32)
    counts[-1] += shape.drafts - plan.num_drafts
    pads = np.full(added, pad_row, np.int32)
    return msgspec.structs.replace(
        plan,
        rows=np.concatenate([plan.rows, pads]),
        counts=np.concatenate([plan.counts, counts]),
        num_decodes=shape.rows,
        num_drafts=shape.drafts,
        samples=np.arange(shape.rows, dtype=np.int32),
        sample_rows=np.concatenate([plan.sample_rows, pads]),
    )
