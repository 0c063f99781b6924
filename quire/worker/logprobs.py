"""Reports of how likely tokens were: made on the device for many rows at a time, read once the step is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from quire.messages.plan import TokenLogprobs

REPORT_ROWS = 256
"""Log-probabilities exist for at most so many rows at a time: a row of a large vocabulary is half a megabyte."""
NARROW = 1024
"""Reports of so many tokens a row wait on the device to be copied at once; whole vocabularies would fill it."""


class Reports:
    """For each row of logits [n, vocab] its token's log-probability, then the best ones; on their way to the host."""

    def __init__(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], count: int) -> None:
        """`parts`: logits, and a token a row. `count` -1: all of the vocabulary. Nothing here waits for the device."""
        packed: Iterable[torch.Tensor] = (
            _pack(some, owns, count)
            for logits, tokens in parts
            for some, owns in zip(logits.split(REPORT_ROWS), tokens.split(REPORT_ROWS), strict=True)
        )
        if 0 <= count <= NARROW and (whole := list(packed)):
            packed = [torch.cat(whole)]
        # Into pinned memory, from a GPU.
        self._packed = [part.to("cpu", non_blocking=True) for part in packed]

    def take(self) -> list[TokenLogprobs]:
        """A row each, once the device is done."""
        return [entry for part in self._packed for entry in _unpack(part.numpy())]


def _pack(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """[n, 2 * (1 + count) + 1] int32: ids, the bits of log-probabilities, and the token's rank."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > own).sum(-1, keepdim=True) + 1
    vocab = logits.shape[-1]
    best = logprobs.topk(vocab if count < 0 else min(count, vocab))
    ids, values = torch.cat([tokens[:, None], best.indices], dim=1), torch.cat([own, best.values], dim=1)
    return torch.cat([ids.to(torch.int32), values.view(torch.int32), rank.to(torch.int32)], dim=1)


def _unpack(packed: np.ndarray) -> Iterator[TokenLogprobs]:
    width = packed.shape[1] // 2
    ids, values = packed[:, :width], np.ascontiguousarray(packed[:, width:-1]).view(np.float32)
    columns = ids.tolist(), values.tolist(), packed[:, -1].tolist()
    return (TokenLogprobs(*entry) for entry in zip(*columns, strict=True))
