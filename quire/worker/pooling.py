"""One vector for a prompt: the last token's hidden state, or the average over all of them. A classifier's head makes
the numbers of its classes of it.

A prompt may come in chunks. The average is summed chunk by chunk, on the device, in float32, and kept with the row: a
preempted request gets a new row and starts again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.messages.plan import StepPlan, Vector
from quire.worker.batch import DeviceBatch
from quire.worker.extras import RowKind


def _to_host(vectors: torch.Tensor) -> torch.Tensor:
    """Starts the copy, which is done when the step's event is."""
    if vectors.device.type == "cpu":
        return vectors
    host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
    return host.copy_(vectors, non_blocking=True)


class PendingVectors:
    """The vectors of a step's pooled rows, being copied to the host."""

    def __init__(self, draws: list[int], vectors: torch.Tensor) -> None:
        """`vectors`: one for each draw."""
        self._draws = draws
        self._host = _to_host(vectors)

    def take(self) -> dict[int, Vector]:
        """By draw. The step must be done."""
        return dict(zip(self._draws, self._host.numpy(), strict=True))


NOTHING = PendingVectors([], torch.empty(0))


def pool(
    plan: StepPlan,
    batch: DeviceBatch,
    hidden: torch.Tensor,
    last_only: bool,
    classify: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> PendingVectors:
    """The vectors of rows whose prompt ends in this step; sums of the other rows are continued.

    `last_only`: `hidden` has one row per draw, not one per token. `classify`: a classifier's head.
    """
    kinds = batch.kinds[plan.rows]
    if not (kinds & RowKind.POOLED).any():
        return NOTHING
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
    if not draws:
        return NOTHING
    pooled = torch.cat(vectors)
    return PendingVectors(draws, pooled if classify is None else classify(pooled))
