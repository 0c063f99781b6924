"""The result of moving experts between ranks to balance their load."""

from __future__ import annotations

import msgspec


class Rebalanced(msgspec.Struct, frozen=True):
    """Load imbalance of the ranks, over all layers, since experts last moved: highest tokens of a rank ÷ mean."""

    before: float
    after: float
    """What it would have been with the new placement; 1 is even."""
    moved: int
    """Experts copied between ranks."""
