"""Beam search, the choice: which continuations go on, which sequences are kept, and when it is over.

The rules are those of transformers, so that its results are ours. Of all beams' continuations the best few are looked
at. Those that do not end go on, as many as the search is wide. Those that end are kept if they are among the best
`width` of all, and of the kept the best `width` by score stay.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from quire.messages.beams import Beam, BeamSearchParams, Hypothesis
from quire.messages.request import NewRequest, Request


def num_candidates(params: BeamSearchParams, num_ends: int) -> int:
    """Continuations looked at in a step: enough for `width` to go on if every beam may end with every end token."""
    return max(2, 1 + num_ends) * params.beam_width


class BeamChoice(NamedTuple):
    """A beam continues with a token."""

    parent: int
    """Which of the beams."""
    token: int
    logprob: float
    rank: int
    total: float


class BeamSearch:
    """One request's search."""

    def __init__(self, source: NewRequest, params: BeamSearchParams, samples: list[Request]) -> None:
        self.beams = samples[:1]
        """Running beams, best first."""
        self.spare = samples[1:]
        """Sequences that no beam is in."""
        self.finished: list[Hypothesis] = []
        """The best sequences that have ended, best first."""
        self._params = params
        self._prompt = len(source.prompt)
        self._limit = source.limit
        self._eos = frozenset(() if params.ignore_eos else source.eos_ids)
        self._ends = self._eos.union(params.stop_token_ids or ())

    @property
    def has_drawn(self) -> bool:
        """Whether all beams know what may follow them."""
        return all(request.beam is not None and request.beam.candidates is not None for request in self.beams)

    def choose(self) -> list[BeamChoice]:
        """How the beams continue, best first; nothing if the search is over."""
        width = self._params.beam_width
        length = self.beams[0].known + 1 - self._prompt
        is_last = self.beams[0].known + 1 >= self._limit
        going: list[BeamChoice] = []
        for place, choice in enumerate(self._best()):
            if not is_last and choice.token not in self._ends:
                going.append(choice)
            elif place < width:
                self._keep(choice, length)
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[:width]
        return going[:width] if going and self._can_improve(going[0].total, length) else []

    def _best(self) -> list[BeamChoice]:
        """The best continuations of all beams. Each beam's come best first: most are never looked at."""
        every = [_continuations(parent, request.beam) for parent, request in enumerate(self.beams)]
        best = heapq.merge(*every, key=lambda choice: choice.total, reverse=True)
        return list(itertools.islice(best, num_candidates(self._params, len(self._ends))))

    def _keep(self, choice: BeamChoice, length: int) -> None:
        """A sequence has ended."""
        request, token = self.beams[choice.parent], choice.token
        assert request.beam is not None
        beam = request.beam.followed(choice.logprob, choice.rank)
        self.finished.append(
            Hypothesis(
                tokens=[*request.output, token],
                logprobs=beam.logprobs,
                ranks=beam.ranks,
                total=beam.total,
                score=self._score(beam.total, length),
                reason="stop" if token in self._ends else "length",
                stop_reason=token if token in self._ends - self._eos else None,
            )
        )

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self._params.length_penalty)

    def _can_improve(self, best: float, length: int) -> bool:
        """Whether it is worth going on, with an open beam of `best` in all after `length` tokens."""
        if len(self.finished) < self._params.beam_width:
            return True
        if self._params.early_stopping is True:
            return False
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._limit - self._prompt
        return self._score(best, length) > self.finished[-1].score


def _continuations(parent: int, beam: Beam | None) -> Iterator[BeamChoice]:
    """What may follow a beam, best first."""
    if beam is not None and beam.candidates is not None:
        ids, values = beam.candidates.ids, beam.candidates.values
        for rank in range(1, len(ids)):
            yield BeamChoice(parent, ids[rank], values[rank], rank, beam.total + values[rank])
