"""Reports of how likely tokens were."""

from __future__ import annotations

import torch

from quire.messages.plan import TokenLogprobs


def top_logprobs(logprobs: torch.Tensor, tokens: torch.Tensor, count: int) -> list[TokenLogprobs]:
    """For each row of logprobs [n, vocab]: the given token's, then the `count` best (-1: all of them)."""
    if not len(tokens):
        return []
    count = logprobs.shape[-1] if count < 0 else min(count, logprobs.shape[-1])
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    best = logprobs.topk(count)
    ids = torch.cat([tokens[:, None], best.indices], dim=1).tolist()
    values = torch.cat([own, best.values], dim=1).tolist()
    return [TokenLogprobs(*entry) for entry in zip(ids, values, ranks.tolist(), strict=True)]
