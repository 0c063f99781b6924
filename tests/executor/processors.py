"""Logits processors that rank processes import by dotted path."""

from __future__ import annotations

import os
import time

import torch

from quire.messages.sampling import SamplingParams


class FailsOnce:
    """Raises at its third row, on every rank or only on one; then does nothing."""

    calls = 0

    def applies(self, params: SamplingParams) -> bool:
        return "fails" in (params.extra_args or {})

    def apply(
        self, logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, params: SamplingParams
    ) -> torch.Tensor:
        from torch import distributed

        self.calls += 1
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        if self.calls == 3 and params.extra_args["fails"] in (rank, "everywhere"):
            raise RuntimeError(f"a processor that fails, in {os.getpid()}")
        return logits


class TakesLong:
    """Does nothing, slowly. Only ranks of the last stage call it."""

    def applies(self, params: SamplingParams) -> bool:
        return "seconds" in (params.extra_args or {})

    def apply(
        self, logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, params: SamplingParams
    ) -> torch.Tensor:
        time.sleep(params.extra_args["seconds"])
        return logits


class LoadsLate(TakesLong):
    """Takes three seconds to construct on the second rank."""

    def __init__(self) -> None:
        from torch import distributed

        if distributed.is_initialized() and distributed.get_rank() == 1:
            time.sleep(3)
