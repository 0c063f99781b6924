"""Reports of how likely tokens were: made on the device for many rows at a time, read once the step is done."""

from __future__ import annotations

import torch

from quire.messages.plan import TokenLogprobs

REPORT_ROWS = 128
"""Log-probabilities exist for at most so many rows at a time: a row of a large vocabulary is half a megabyte."""


class Reports:
    """For each row of logits [n, vocab] the given token's log-probability, then the `count` best; on their way here."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> None:
        """`count` -1: all of them. What is asked for is computed before this returns or later, but never waited for."""
        vocab = logits.shape[-1]
        count = vocab if count < 0 else min(count, vocab)
        self._parts = [
            _report(part, owns, count)
            for part, owns in zip(logits.split(REPORT_ROWS), tokens.split(REPORT_ROWS), strict=True)
        ]

    def take(self) -> list[TokenLogprobs]:
        """A row each, once the device is done."""
        return [
            TokenLogprobs(*entry)
            for ids, values, ranks in self._parts
            for entry in zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
        ]


def _report(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> list[torch.Tensor]:
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    best = logprobs.topk(count)
    found = torch.cat([tokens[:, None], best.indices], dim=1), torch.cat([own, best.values], dim=1), ranks
    return [tensor.to("cpu", non_blocking=True) for tensor in found]  # into pinned memory, from a GPU
