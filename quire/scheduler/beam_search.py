"""Beam search: which continuations are kept (`BeamSearch`), and what that means for rows and blocks (`BeamRows`).

The rules are those of transformers, so that the results are the same. Of all beams' continuations the best few are
considered. Those that do not end continue, up to the width of the search. Those that end are kept if they are among the
best `width` of all, and of the kept ones the best `width` by score stay.

The host chooses after each draw, so a beam's row waits: it computes again when all beams of its search have drawn and
the choice is made. Other requests run meanwhile, also in steps that are launched ahead. Beams that continue keep
their rows, further continuations of the same beam fork from it and share its blocks, and the rest give their rows back.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from quire.messages.beams import Beam, BeamSearchParams, Hypothesis
from quire.messages.plan import TokenLogprobs
from quire.messages.request import NewRequest, Request, RequestState

if TYPE_CHECKING:
    from quire.scheduler.request_table import RequestTable


def num_candidates(params: BeamSearchParams, num_ends: int) -> int:
    """Continuations considered in a step: enough for `width` to continue if every beam may end with every end token."""
    return max(2, 1 + num_ends) * params.beam_width


class BeamChoice(NamedTuple):
    """A beam continues with a token."""

    parent: int
    """Index of the beam."""
    token: int
    logprob: float
    rank: int
    total: float


class BeamSearch:
    """One request's search."""

    def __init__(self, source: NewRequest, params: BeamSearchParams, sequences: list[Request]) -> None:
        self.beams = sequences[:1]
        """Running beams, best first."""
        self.spare = sequences[1:]
        """Sequences that are not beams at the moment."""
        self.finished: list[Hypothesis] = []
        """The best of the sequences that have ended, best first."""
        self._params = params
        self._prompt = len(source.prompt)
        self._limit = source.limit
        self._eos = frozenset(() if params.ignore_eos else source.eos_ids)
        self._ends = self._eos.union(params.stop_token_ids or ())

    @property
    def has_drawn(self) -> bool:
        """Whether all beams have candidates to continue with."""
        return all(map(_has_drawn, self.beams))

    def choose(self) -> list[BeamChoice]:
        """How the beams continue, best first; empty if the search is over."""
        width = self._params.beam_width
        length = self.beams[0].known + 1 - self._prompt
        is_last = self.beams[0].known + 1 >= self._limit
        continuing: list[BeamChoice] = []
        for place, choice in enumerate(self._best()):
            if not is_last and choice.token not in self._ends:
                continuing.append(choice)
            elif place < width:
                self._keep(choice, length)
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[:width]
        return continuing[:width] if continuing and self._can_improve(continuing[0].total, length) else []

    def _best(self) -> list[BeamChoice]:
        """The best continuations of all beams. Each beam's come best first: the merge never reaches most of them."""
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
        """Whether an open beam of log-probability `best` after `length` tokens may still beat a finished one."""
        if len(self.finished) < self._params.beam_width:
            return True
        if self._params.early_stopping is True:
            return False
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._limit - self._prompt
        return self._score(best, length) > self.finished[-1].score


def _continuations(parent: int, beam: Beam | None) -> Iterator[BeamChoice]:
    """A beam's continuations, best first."""
    if beam is not None and beam.candidates is not None:
        ids, values = beam.candidates.ids, beam.candidates.values
        for rank in range(1, len(ids)):
            yield BeamChoice(parent, ids[rank], values[rank], rank, beam.total + values[rank])


class BeamRows:
    """Collects the candidates of beams, and carries out the choices."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._rows = requests.rows

    def collect(self, request: Request, candidates: TokenLogprobs | None) -> None:
        """A beam has drawn. When all beams of its search have, the search advances."""
        if request.beam is None or candidates is None:
            if request.row >= 0 and self._requests.tables.state_pages:
                self._requests.restart(request)  # its state is a token ahead: it cannot compute that token again
            elif request.row >= 0:
                self._rows.draw_again(request.row)
            return
        request.beam.candidates = candidates
        if request.row < 0:  # preempted since the launch: drawing again would yield the same
            self._requests.policy.remove(request)
        search = self._requests.searches[request.id]
        if search.has_drawn:
            self._advance(search)

    def park(self) -> None:
        """Beams that have drawn give their rows back while others of their search wait for one."""
        for search in self._requests.searches.values():
            if any(beam.row < 0 and not _has_drawn(beam) and not beam.in_flight for beam in search.beams):
                for beam in search.beams:
                    if beam.row >= 0 and _has_drawn(beam):
                        self._requests.leave_row(beam, RequestState.PREEMPTED)

    def _advance(self, search: BeamSearch) -> None:
        """All beams have drawn: continue, fork and retire them as the search chooses, or end the search."""
        choices = search.choose()
        if not choices:
            self._requests.finish_search(search.beams[0], search.finished)
            return
        parents = search.beams
        continued = {choice.parent for choice in choices}
        for i, parent in enumerate(parents):
            if i not in continued:
                self._retire(search, parent)
        # Forks come first: they start from what their parent has before it continues itself.
        forks: list[Request | None] = []
        for choice in choices:
            keeps_row = choice.parent in continued
            continued.discard(choice.parent)
            forks.append(None if keeps_row else self._fork(parents[choice.parent], search.spare.pop(), choice))
        search.beams = [fork or parents[choice.parent] for fork, choice in zip(forks, choices, strict=True)]
        for fork, choice in zip(forks, choices, strict=True):
            if fork is None:
                self._continue(parents[choice.parent], choice)
        self._requests.stats.generated_tokens += len(choices)

    def _retire(self, search: BeamSearch, beam: Request) -> None:
        """No continuation of this beam was chosen."""
        if beam.row >= 0:
            self._requests.leave_row(beam)
        if beam.state is not RequestState.WAITING:  # it already is if a step failed after it drew
            beam.move(RequestState.WAITING)
        search.spare.append(beam)

    def _fork(self, parent: Request, child: Request, choice: BeamChoice) -> Request:
        """A second continuation of the same beam was chosen."""
        child.start_beam(parent, choice.token, choice.logprob, choice.rank)
        self._requests.branch(parent, child)
        return child

    def _continue(self, beam: Request, choice: BeamChoice) -> None:
        beam.extend_beam(choice.token, choice.logprob, choice.rank)
        if beam.row >= 0:
            self._requests.extend_row(beam, 1)
        else:
            self._requests.requeue(beam)


def _has_drawn(request: Request) -> bool:
    return request.beam is not None and request.beam.candidates is not None
