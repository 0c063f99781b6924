"""Mixed steps (prompts and decodes), padded to one of a few shapes, so that they can be CUDA graphs too.

Launched kernel by kernel, such a step keeps Python busy for longer than the device: hundreds of launches, however
small the chunk. So a plan is *padded*: its decodes to one of a few numbers of rows, its prompt tokens to one of a few
numbers of tokens. The added rows are the batch's padding row, which is never active: they write to the null block,
attend to nothing, and their draws come after the real ones and are never read. A padded plan is a plan like any other.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.messages.plan import StepPlan

DECODES = (0, 16, 32, 64, 128, 256)
TOKENS = (32, 64, 96, 128, 192, 256, 384, 512)
"""Prompt tokens that steps are padded to. Multiples of 16, so that no kernel is compiled for one of them alone."""
PROMPTS = 8
"""Most rows with prompt tokens; steps with more are launched kernel by kernel."""


@dataclass(frozen=True)
class MixedShape:
    """The shape of a captured step; the key of its graph."""

    decodes: int
    tokens: int
    """Prompt tokens."""
    is_long: bool
    """Attention has other tiles for long contexts."""
    grouped: bool
    """Whether attention reads the blocks of prefix groups once for all their rows."""
    proposals: int = 0
    """Drafts that the proposer on the device makes for each row that draws."""
    adapted: bool = False
    """Whether rows may have LoRA adapters."""

    @property
    def rows(self) -> int:
        """One more than may be needed: it takes the padding tokens."""
        return self.decodes + PROMPTS + 1

    @property
    def num_tokens(self) -> int:
        """All tokens of a step, padding included."""
        return self.decodes + self.tokens

    @property
    def draws(self) -> int:
        return self.decodes + PROMPTS


def shape_of(plan: StepPlan, long_context: int, grouped: bool, max_rows: int, max_tokens: int) -> MixedShape | None:
    """The shape a step with prompts is padded to; None if the plan is too large for any shape, or the shape for a
    batch of `max_rows` rows and `max_tokens` prompt tokens per step."""
    prompts, tokens = len(plan.rows) - plan.num_decodes, len(plan.tokens)
    if not 0 < prompts <= PROMPTS or plan.num_decodes > DECODES[-1] or tokens > TOKENS[-1] or plan.forks:
        return None
    shape = MixedShape(
        DECODES[bisect_left(DECODES, plan.num_decodes)],
        TOKENS[bisect_left(TOKENS, tokens)],
        plan.max_context > long_context,
        grouped,
    )
    return shape if shape.draws <= max_rows and shape.tokens <= max_tokens else None


def pad_plan(plan: StepPlan, shape: MixedShape, pad_row: int) -> StepPlan:
    """The plan with padding rows, so that it has the shape."""
    decodes, prompts = plan.num_decodes, len(plan.rows) - plan.num_decodes
    pad_decodes, pad_tokens = shape.decodes - decodes, shape.tokens - len(plan.tokens)
    pad_prompts = shape.rows - shape.decodes - prompts
    pads = np.full(max(pad_decodes, pad_prompts, shape.draws), pad_row, np.int32)
    zeros = np.zeros(shape.tokens, np.int32)
    counts = np.concatenate(
        [plan.counts[:decodes], np.ones(pad_decodes, np.int32), plan.counts[decodes:], zeros[:pad_prompts]]
    )
    counts[-1] = pad_tokens
    samples = plan.samples + np.where(plan.samples < decodes, 0, pad_decodes).astype(np.int32)
    unread = shape.draws - len(samples)
    return msgspec.structs.replace(
        plan,
        rows=np.concatenate([plan.rows[:decodes], pads[:pad_decodes], plan.rows[decodes:], pads[:pad_prompts]]),
        counts=counts,
        num_decodes=shape.decodes,
        tokens=np.concatenate([plan.tokens, zeros[:pad_tokens]]),
        samples=np.concatenate([samples, np.full(unread, shape.rows - 1, np.int32)]),
        sample_rows=np.concatenate([plan.sample_rows, pads[:unread]]),
        following=_pad_following(plan, shape) if shape.proposals else plan.following[:0],
    )


def _pad_following(plan: StepPlan, shape: MixedShape) -> np.ndarray:
    """For each row after the decodes the token after its chunk, -1 where the plan names none."""
    padded = np.full(shape.rows - shape.decodes, -1, np.int32)
    padded[: len(plan.following)] = plan.following
    return padded
