"""What a proposer on the host implements. It never touches tensors: it runs beside the scheduler, while a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.messages.outputs import Key


class HostProposer(Protocol):
    """Proposes the tokens that requests may draw next, from those that are known."""

    def start(self, key: Key, tokens: Sequence[int], tenant: str) -> None:
        """A sequence takes a row with these tokens, prompt and output; it may have had one before."""
        ...

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        """The sequence has drawn these tokens."""
        ...

    def propose(self, key: Key, most: int) -> list[int]:
        """At most `most` tokens that may follow those that are known, the first of them next; none if there is no
        guess."""
        ...

    def leave(self, key: Key, has_ended: bool) -> None:
        """The sequence leaves its row. `has_ended`: for good, with the tokens it has."""
        ...
