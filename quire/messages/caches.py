"""Cache groups: layers whose caches have the same lifetime, with one block table a row.

All groups draw pages of one size from one pool. A page of a group holds `block_size` tokens of each of its layers; a
recurrent state, which does not grow with the tokens, takes a fixed number of pages.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class CacheGroup(msgspec.Struct, frozen=True):
    """What the planning half knows of a group."""

    kind: Literal["full", "window", "state"]
    layers: tuple[int, ...]
    """Their indices in the whole model."""
    window: int = 0
    """Window groups: a query sees itself and the window - 1 tokens before it."""
    pages: int = 0
    """State groups: pages of one state."""


FULL = CacheGroup("full", ())
"""The only group of a model whose layers all keep every token."""
