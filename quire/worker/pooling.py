"""One vector for a prompt: the last token's hidden state, or the average over all of them.

A prompt may come in chunks. The average is summed up chunk by chunk, on the device, in float32, and kept with the row:
a row that is preempted gets a new one and begins again.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.messages.plan import StepPlan, Vector
from quire.worker.batch import DeviceBatch
from quire.worker.extras import RowKind


class PendingVectors:
    """What a step's pooled rows came to, on its way to the host."""

    def __init__(self, draws: list[int], vectors: list[torch.Tensor]) -> None:
        """`vectors`: lines of them, one a draw in all."""
        self._draws = draws
        self._host = _to_host(torch.cat(vectors)) if vectors else torch.empty(0)

    def take(self) -> dict[int, Vector]:
        """By draw. The step must be done."""
        return dict(zip(self._draws, self._host.numpy(), strict=True))


def pool(plan: StepPlan, batch: DeviceBatch, hidden: torch.Tensor, is_narrow: bool) -> PendingVectors:
    """The vectors of rows whose prompt this step ends; sums of those it does not end go on.

    `is_narrow`: `hidden` has a line for each draw, and no other.
    """
    kinds = batch.kinds[plan.rows]
    if not (kinds & RowKind.POOLED).any():
        return PendingVectors([], [])
    ends = np.cumsum(plan.counts)
    last = np.flatnonzero(kinds[plan.samples] & RowKind.LAST)
    draws, vectors = last.tolist(), list[torch.Tensor]()
    if draws:
        (lines,) = batch.upload(last if is_narrow else ends[plan.samples[last]] - 1)
        vectors.append(hidden[lines].float())
    draw_of = {entry: draw for draw, entry in enumerate(plan.samples.tolist())}
    for i in np.flatnonzero(kinds & RowKind.MEAN).tolist():
        extras = batch.extras[int(plan.rows[i])]
        part = hidden[ends[i] - plan.counts[i] : ends[i]].sum(0, keepdim=True, dtype=torch.float32)
        extras.total = part if extras.total is None else extras.total + part
        if (draw := draw_of.get(i)) is not None:
            draws.append(draw)
            vectors.append(extras.total / extras.prompt_len)
    return PendingVectors(draws, vectors)


def _to_host(vectors: torch.Tensor) -> torch.Tensor:
    """On their way: who waits for the step's event has waited for the copy too."""
    if vectors.device.type == "cpu":
        return vectors
    host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
    return host.copy_(vectors, non_blocking=True)
