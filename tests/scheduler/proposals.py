"""Drafts for storms: from the device, the host or both, of a skill that depends on the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.messages.outputs import Key
from quire.messages.speculation import DeviceDrafts
from quire.scheduler.drafting import Drafting
from tests.scheduler.harness import Bench, rng_of


class DraftShape(Protocol):
    """The part of an engine's configuration that is about drafts."""

    @property
    def drafts(self) -> str:
        """Where drafts come from: "device", "host", "both", or "" for no drafts."""

    @property
    def most_drafts(self) -> int: ...

    @property
    def skill(self) -> float:
        """The share of drafts that are right."""

    @property
    def verifies_with_prompts(self) -> bool: ...

    @property
    def tunes(self) -> bool: ...


class Proposals:
    """Makes drafts; `bench` is set once it exists."""

    bench: Bench

    def __init__(self, shape: DraftShape, seed: int) -> None:
        self.shape = shape
        self._seed = seed

    def drafting(self) -> Drafting | None:
        """What the scheduler is made with."""
        shape = self.shape
        if not shape.drafts:
            return None
        proposes = shape.drafts in ("device", "both")
        device = DeviceDrafts(proposes, proposes and shape.most_drafts % 2 == 1, proposes, shape.verifies_with_prompts)
        host = HostGuesses(self, self._seed) if shape.drafts in ("host", "both") else None
        return Drafting(shape.most_drafts, host, device, shape.tunes)

    def guess(self, key: Key, tokens: list[int], position: int, count: int) -> list[int]:
        """The device's proposer, as the harness has it."""
        rng = rng_of("guess", self._seed, *key, position)
        skill = rng_of("skill", *key).choice([0.0, self.shape.skill, self.shape.skill, 1.0])
        right = tokens[position : position + rng.randint(0, count)]
        return [token if rng.random() < skill else 3 for token in right]


class HostGuesses:
    """A proposer on the host: some of the time it raises."""

    def __init__(self, proposals: Proposals, seed: int) -> None:
        self._proposals = proposals
        self._rng = rng_of("host", seed)
        self._tokens: dict[Key, list[int]] = {}

    def start(self, key: Key, tokens: Sequence[int], tenant: str) -> None:
        assert key not in self._tokens
        self._tokens[key] = list(tokens)

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        self._tokens[key] += tokens

    def propose(self, key: Key, most: int) -> list[int]:
        known = self._tokens[key]
        truth = self._proposals.bench.device.truth(*key).tokens
        assert known == truth[: len(known)], "it has other tokens than the request"
        if self._rng.random() < 0.01:
            raise ValueError("no guess")
        return self._proposals.guess(key, truth, len(known), most)

    def leave(self, key: Key, has_ended: bool) -> None:
        del self._tokens[key]
