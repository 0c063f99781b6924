"""From a draft's logits to drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.philox import uniform
from quire.messages.sampling import DRAFT_STREAM
from quire.speculative.config import PROBABILISTIC
from quire.speculative.device import ProposalStep

WINDOW = 256
"""Tokens among which top-k and top-p of a draft are looked for: a larger nucleus is not cut."""


def choose(
    logits: torch.Tensor, step: ProposalStep, number: int, method: str, targets: torch.Tensor | None = None
) -> torch.Tensor:
    """[R] int64: draft `number` (from 0) of each row, from logits [R, tokens of the draft].

    `method`: `draft_sample_method`: the most likely token, or one that is drawn.

    `targets` [tokens of the draft]: the token of the target that each stands for; None: the same. They must be in
    ascending order for probabilistic drafts: a draw walks through the vocabulary.
    """
    chosen = logits.argmax(-1)
    if method == PROBABILISTIC:
        chosen = _draw(logits, step, number, chosen, targets)
    return chosen if targets is None else targets[chosen]


def write(step: ProposalStep, drafts: Sequence[torch.Tensor]) -> None:
    """Give the rows that draw their drafts: [R] each, in order."""
    batch, rows = step.batch, step.rows
    batch.drafts[rows, : len(drafts)] = torch.stack(list(drafts), dim=1).to(batch.drafts.dtype)
    batch.num_drafts.index_fill_(0, rows, len(drafts))  # not by index: that copies the number from the host
    if batch.draft_probs is not None:
        batch.is_sampled[rows] = batch.scalars_of(rows)["temperature"] > 0


def _draw(
    logits: torch.Tensor, step: ProposalStep, number: int, greedy: torch.Tensor, targets: torch.Tensor | None
) -> torch.Tensor:
    """Tokens drawn as the target will draw at that position, with its random number: where the draft's distribution is
    like the target's, so is the token. If drafts are accepted by the ratio of both probabilities, with another number,
    and the draft's probabilities are kept."""
    batch, rows = step.batch, step.rows
    scalars = batch.scalars_of(rows)
    temperature = scalars["temperature"]
    scaled = logits.float() / temperature.clamp(min=1e-5)[:, None]
    scaled = _cut(scaled, scalars["top_k"], scalars["top_p"], scalars["min_p"])
    probs = torch.softmax(scaled, dim=-1)
    sequence = batch.sequence[rows]
    if batch.draft_probs is not None:
        sequence = sequence + DRAFT_STREAM
        if targets is None:
            batch.draft_probs[rows, number, : probs.shape[-1]] = probs
        else:
            batch.draft_probs[:, number].index_fill_(0, rows, 0.0)
            batch.draft_probs[rows[:, None], number, targets] = probs
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    index = batch.num_tokens[rows] - batch.prompt_len[rows] + number
    numbers = uniform(batch.seed[rows], index, sequence).to(torch.float64)
    drawn = torch.searchsorted(cumulative, (numbers * cumulative[:, -1])[:, None], right=True)[:, 0]
    return torch.where(temperature > 0, drawn.clamp(max=logits.shape[-1] - 1), greedy)


def _cut(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Logits [R, tokens] without the tokens that top-k, top-p and min-p exclude, where `WINDOW` of them tell."""
    best = logits.topk(min(WINDOW, logits.shape[-1])).values
    places = torch.arange(best.shape[-1], device=logits.device)
    kept = (top_k[:, None] <= 0) | (places < top_k[:, None])
    weights = torch.where(kept, (best - best[:, :1]).exp(), 0.0)
    total = torch.where(top_k > 0, weights.sum(-1), (logits - best[:, :1]).exp().sum(-1))
    before = weights.cumsum(-1) - weights
    kept &= (before < (top_p * total)[:, None]) | (top_p >= 1.0)[:, None]
    last = kept.sum(-1) - 1
    # All of the window is kept: what is excluded begins past it.
    floor = torch.where(last + 1 < best.shape[-1], best.gather(1, last.clamp(min=0)[:, None])[:, 0], float("-inf"))
    floor = torch.maximum(floor, best[:, 0] + min_p.log())
    return logits.masked_fill(logits < floor[:, None], float("-inf"))
