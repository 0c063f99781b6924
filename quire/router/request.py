"""A request as the router sees it, and its stay at a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRequest:
    """What decides where a request goes."""

    id: str
    keys: Sequence[bytes]
    """Content keys of the prompt's full blocks. A tenant's salt is in them, so nobody is drawn to another's blocks."""
    prompt_tokens: int
    samples: int = 1
    """Rows it takes once its prompt is computed."""
    tenant: str = ""
    session: str = ""
    """The session whose turn it is; names are the tenant's own."""


@dataclass(slots=True, eq=False)
class RoutedFlight:
    """One request at one replica, from launch to end. What comes late, for a flight that is over, changes nothing."""

    request: RoutedRequest
    replica: str
    uncached: int
    """Prompt tokens that are to be computed: what the router believes, until the replica says."""
    launched: float
    started: float | None = None
    """When its first token came. Until then nobody has seen anything of it, and it can begin again elsewhere."""
    generated: int = 0
    """Tokens so far, over all samples."""
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """What was at a replica that is gone."""

    unstarted: list[RoutedRequest]
    """To be routed again, in the order they came."""
    started: list[RoutedRequest]
    """Their readers have tokens already: they are owed an error."""
