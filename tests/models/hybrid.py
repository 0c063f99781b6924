"""Steps of hybrid models over pages made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.models.harness import PagedRun


class HybridRun(PagedRun):
    """Rows that can be forked and given back."""

    def __init__(self, stages: Any, blocks: int = 512) -> None:
        super().__init__(stages, blocks=blocks)

    def fork(self, row: str, new: str) -> None:
        """A row with a copy of another's blocks and states."""
        self.computed[new] = self.computed[row]
        self.tables[new] = [[self.free.pop() for _ in table] for table in self.tables[row]]
        pairs = [
            (source, target)
            for old, copy in zip(self.tables[row], self.tables[new], strict=True)
            for source, target in zip(old, copy, strict=True)
        ]
        for pool in self.pools:
            pool.copy(pairs)

    def release(self, row: str) -> None:
        """Give back a row's blocks and pages, as they are."""
        for table in self.tables.pop(row):
            self.free += table
        del self.computed[row]


def in_chunks(stages: Any, tokens: Sequence[int], sizes: Callable[[int], int]) -> torch.Tensor:
    """Logits of every token; step i takes `sizes(i)` of them."""
    run, parts, done = HybridRun(stages), [], 0
    while done < len(tokens):
        size = sizes(len(parts))
        parts.append(run.step({"row": tokens[done : done + size]})["row"])
        done += size
    return torch.cat(parts)
