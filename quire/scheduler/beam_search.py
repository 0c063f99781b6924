"""Beam search, the rows: beams that continue keep theirs, others branch off and share its blocks, the rest leave.

A beam needs the host after each draw, so its row waits: it computes again when all beams of its search have drawn and
the choice is made. Other requests go on meanwhile, also in steps that are launched ahead.
"""

from __future__ import annotations

from quire.messages.plan import Fork, TokenLogprobs
from quire.messages.request import Request, RequestState
from quire.scheduler.beams import BeamChoice, BeamSearch
from quire.scheduler.request_table import RequestTable


class BeamRows:
    """Takes what beams may continue with, and puts choices into effect."""

    def __init__(self, ledger: RequestTable) -> None:
        self._ledger = ledger
        self._rows = ledger.rows

    def take(self, request: Request, candidates: TokenLogprobs | None) -> None:
        """A beam has drawn. The last of its search to do so has the choice made."""
        search = self._ledger.searches[request.id]
        if request.beam is None or candidates is None:
            self._draw_again(request)
            return
        request.beam.candidates = candidates
        if request.row < 0:  # preempted since: it would only draw the same
            self._ledger.policy.remove(request)
        if search.has_drawn:
            self._advance(search)

    def park(self) -> None:
        """Beams that have drawn hold nothing while others of their search wait for a row: those may need just that."""
        for search in self._ledger.searches.values():
            if any(beam.row < 0 and not _has_drawn(beam) and not beam.in_flight for beam in search.beams):
                for beam in search.beams:
                    if beam.row >= 0 and _has_drawn(beam):
                        self._ledger.leave_row(beam)
                        beam.move(RequestState.PREEMPTED)

    def _draw_again(self, request: Request) -> None:
        """The draw came to nothing: the row's last token is computed once more."""
        if request.row >= 0:
            self._rows.bound[request.row] -= 1
            self._rows.computed[request.row] -= 1
            self._rows.held[request.row] = False

    def _advance(self, search: BeamSearch) -> None:
        choices = search.choose()
        if not choices:
            self._ledger.outputs.beams.append((search.beams[0].id, search.finished))
            self._ledger.finish(search.beams[0], "stop")
            return
        parents = search.beams
        continued = {choice.parent for choice in choices}
        for i, parent in enumerate(parents):
            if i not in continued:
                self._retire(search, parent)
        # Those that branch off first: they begin with what their parent has now.
        heirs: list[Request | None] = []
        for choice in choices:
            keeps_row = choice.parent in continued
            continued.discard(choice.parent)
            heirs.append(None if keeps_row else self._branch(parents[choice.parent], search.spare.pop(), choice))
        search.beams = [heir or parents[choice.parent] for heir, choice in zip(heirs, choices, strict=True)]
        for heir, choice in zip(heirs, choices, strict=True):
            if heir is None:
                self._continue(parents[choice.parent], choice)
        self._ledger.stats.generated_tokens += len(choices)

    def _retire(self, search: BeamSearch, beam: Request) -> None:
        """No continuation of this beam was chosen."""
        if beam.row >= 0:
            self._ledger.leave_row(beam)
        if beam.state is not RequestState.WAITING:  # as it is if a step has failed since it drew
            beam.move(RequestState.WAITING)
        search.spare.append(beam)

    def _branch(self, parent: Request, child: Request, choice: BeamChoice) -> Request:
        """A beam begins as a copy of another, one token longer. Without a row for it, it waits for one."""
        ledger, rows = self._ledger, self._rows
        assert parent.beam is not None
        child.output = [*parent.output, choice.token]
        child.beam = parent.beam.followed(choice.logprob, choice.rank)
        child.keys = list(parent.keys)
        child.first_scheduled, child.num_cached = parent.first_scheduled, parent.num_cached
        if parent.row < 0 or not ledger.has_row_for(child):
            ledger.policy.add(child)
            return child
        ledger.tables.fork(parent, child)
        row = rows.take(child, computed=parent.known, bound=child.known)
        rows.capacity[row] = rows.capacity[parent.row]
        rows.began[row] = rows.began[parent.row]
        rows.decoding[row] = True
        child.move(RequestState.RUNNING)
        if row in ledger.dropped:
            ledger.dropped.remove(row)
        ledger.branches[row] = Fork(parent.row, row, child.index, child.id)
        ledger.forked.update((parent, child))
        ledger.publish_output(child)
        ledger.note_decoding(child)
        return child

    def _continue(self, beam: Request, choice: BeamChoice) -> None:
        assert beam.beam is not None
        beam.output.append(choice.token)
        beam.beam.follow(choice.logprob, choice.rank)
        if beam.row < 0:
            self._ledger.policy.add(beam)
            return
        self._rows.known[beam.row] = beam.known
        self._rows.held[beam.row] = False
        self._ledger.publish_output(beam)


def _has_drawn(request: Request) -> bool:
    return request.beam is not None and request.beam.candidates is not None
