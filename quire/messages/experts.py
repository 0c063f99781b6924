"""What came of moving experts to where the load is."""

from __future__ import annotations

import msgspec


class Rebalanced(msgspec.Struct, frozen=True):
    """The load of the ranks by the tokens since the experts were last moved: the fullest rank's ÷ the mean, over all
    layers; 1 is perfectly even."""

    before: float
    after: float
    """…and what it would have been with the experts where they are now."""
    moved: int
    """Experts that were copied from rank to rank."""
