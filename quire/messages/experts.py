"""The result of moving experts between ranks to balance their load."""

from __future__ import annotations

import msgspec


class Rebalanced(msgspec.Struct, frozen=True):
    """Imbalance of the ranks: the most loaded rank's tokens ÷ the mean, over all layers, since experts last moved; 1 is
    even."""

    before: float
    after: float
    """What it would have been with the new placement."""
    moved: int
    """Experts copied from rank to rank."""
