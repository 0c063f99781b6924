"""One vector for a prompt: the last token's hidden state, or the average over all of them.

A prompt may come in chunks. The average is summed chunk by chunk, on the device, in float32, and kept with the row: a
preempted request gets a new row and starts again.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.messages.plan import StepPlan, Vector
from quire.worker.batch import DeviceBatch
from quire.worker.extras import RowKind


class PendingVectors:
    """The vectors of a step's pooled rows, being copied to the host."""

    def __init__(self, draws: list[int], vectors: list[torch.Tensor]) -> None:
        """`vectors`: matrices whose rows, together, are one vector per draw."""
        self._draws = draws
        self._host = _to_host(torch.cat(vectors)) if vectors else torch.empty(0)

    def take(self) -> dict[int, Vector]:
        """By draw. The step must be done."""
        return dict(zip(self._draws, self._host.numpy(), strict=True))


def pool(plan: StepPlan, batch: DeviceBatch, hidden: torch.Tensor, last_only: bool) -> PendingVectors:
    """The vectors of rows whose prompt ends in this step; sums of the other rows are continued.

    `last_only`: `hidden` has one row per draw, not one per token.
    """
    kinds = batch.kinds[plan.rows]
    if not (kinds & RowKind.POOLED).any():
        return PendingVectors([], [])
    ends = np.cumsum(plan.counts)
    last = np.flatnonzero(kinds[plan.samples] & RowKind.LAST)
    draws, vectors = last.tolist(), list[torch.Tensor]()
    if draws:
        (lines,) = batch.upload(last if last_only else ends[plan.samples[last]] - 1)
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
    """Starts the copy, which is done when the step's event is."""
    if vectors.device.type == "cpu":
        return vectors
    host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
    return host.copy_(vectors, non_blocking=True)
