"""Converts the outputs of steps to the outputs of requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from quire.messages.histogram import Histogram
from quire.messages.metric_table import GAP_BOUNDS
from quire.messages.outputs import Finished, Key, Logprob, Output, StepEnergy, StepOutputs
from quire.messages.plan import PromptLogprobs, TokenLogprobs
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind
from quire.output.detokenizer import Vocabulary
from quire.output.tracked import TrackedPooling, TrackedRelay, TrackedRequest, TrackedSearch, TrackedSequence


class TokenTimes:
    """Number of tokens of all requests, and seconds between the tokens of each sequence (one gap fewer than tokens).

    Taken where tokens arrive, so that slow readers do not change them.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.gaps = Histogram(GAP_BOUNDS)

    def note(self, count: int, now: float, before: float, sequences: int = 1) -> None:
        """`count` tokens of each of these sequences came now; the previous one came at `before` (0: these are the
        first).

        Tokens that come together share the time since then, so that the count and the sum of gaps stay right.
        """
        self.tokens += count * sequences
        if before:
            self.gaps.add((now - before) / count, count * sequences)
        elif count > 1:
            self.gaps.add(0.0, (count - 1) * sequences)

    def note_whole(self, count: int, seconds: float) -> None:
        """All `count` tokens of a sequence, noted at its end; `seconds`: from its first to its last."""
        self.tokens += count
        if count > 1:
            self.gaps.add(seconds / (count - 1), count - 1)


class OutputProcessor:
    """Gathers the outputs of all open requests."""

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        self.vocabulary = vocabulary
        """Turns tokens into text; None: there is no text."""
        self._open: dict[str, TrackedRequest] = {}
        self.times = TokenTimes()

    def add(self, request: NewRequest, prompt: str | None) -> None:
        """Start tracking a request."""
        if request.pooling is not None:
            self._open[request.id] = TrackedPooling(request, request.pooling, prompt)
        elif request.beams is not None:
            self._open[request.id] = TrackedSearch(request, request.beams, prompt, self.vocabulary)
        else:
            self._open[request.id] = TrackedRequest(request, prompt, self.vocabulary)

    def add_relayed(self, request: NewRequest) -> None:
        """Start tracking a request of another front process, which makes its outputs."""
        self._open[request.id] = TrackedRelay(request)

    def finish_at(self, key: Key, at: int, stop_reason: str) -> Output | None:
        """End a sequence after its first `at` tokens; returns the request's last output if all have ended."""
        tracked = self._open.get(key[0])
        if tracked is None or tracked.sequences[key[1]].finish_reason is not None:
            return None
        del tracked.sequences[key[1]].tokens[at:]
        self._close(tracked, tracked.sequences[key[1]], "stop", stop_reason)
        return self._next_output(tracked, time.monotonic()) if tracked.open == 0 else None

    def continued(self, request_id: str) -> NewRequest:
        """The request as an engine gets it that goes on where another left it: with the tokens it has."""
        return self._open[request_id].continued()

    def num_tokens(self, request_id: str) -> int:
        """Output tokens of an open request so far, over all its sequences."""
        return sum(len(sequence.tokens) for sequence in self._open[request_id].sequences)

    def open_requests(self) -> list[NewRequest]:
        """All open requests, in the order in which they came."""
        return [tracked.request for tracked in self._open.values()]

    def ends(self, request_id: str, reason: str, message: str | None = None) -> StepOutputs:
        """The end of an open request, as an engine would report it that ended all its sequences now."""
        sequences = self._open[request_id].sequences
        keys = [(request_id, one.index) for one in sequences if one.finish_reason is None]
        return StepOutputs(finished=[Finished(key, reason, message=message) for key in keys])

    def tracked(self, request_id: str) -> TrackedRequest:
        """An open request and its outputs so far."""
        return self._open[request_id]

    def forget(self, request_id: str) -> None:
        """Drop further outputs of this request."""
        self._open.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def process(self, outputs: StepOutputs) -> tuple[list[Output], list[tuple[Key, int, str]]]:
        """(outputs for users, sequences that a stop string ends: (key, tokens up to the end, stop string))."""
        now = time.monotonic()
        ends = {end.key: end for end in outputs.finished}
        stops: list[tuple[Key, int, str]] = []
        touched: dict[str, TrackedRequest] = {}
        gaps: dict[tuple[float, int], int] = {}
        """Sequences by the time of their previous token and the number of new ones: mostly all have the same."""
        for started in outputs.started:
            tracked = self._open.get(started.key[0])
            if tracked is not None and tracked.num_cached is None and started.key[1] == 0:
                tracked.num_cached = started.num_cached  # not that of an engine where the request goes on
                tracked.metrics.scheduled_ts = started.at
        for key in outputs.preempted:
            if (tracked := self._open.get(key[0])) is not None:
                tracked.metrics.preemptions += 1
        if outputs.energy is not None:
            self._note_energy(outputs.energy)
        if outputs.drafts is not None:
            self._note_drafts(outputs.keys, outputs.drafts, outputs.counts or [])
        for key, prompt_logprobs in outputs.prompt_logprobs:
            if (tracked := self._open.get(key[0])) is not None:
                self._take_prompt_logprobs(tracked, prompt_logprobs)
        for key, vector in outputs.vectors:
            if isinstance(tracked := self._open.get(key[0]), TrackedPooling):
                tracked.take_vector(vector)
        for request_id, hypotheses in outputs.beams:
            if isinstance(tracked := self._open.get(request_id), TrackedSearch):
                tracked.take(hypotheses, now)
        for key, tokens, logprobs in self._take_plain(outputs, now):
            tracked = self._open.get(key[0])
            if tracked is None or not tokens or tracked.sequences[key[1]].finish_reason is not None:
                continue
            sequence = tracked.sequences[key[1]]
            count = len(tokens)
            tracked.note_tokens(count, now)
            if not tracked.is_plain:
                gap = sequence.last_ts, count
                gaps[gap] = gaps.get(gap, 0) + 1
                sequence.last_ts = now
            before = len(sequence.tokens)
            found = sequence.append(tokens, ends.get(key))
            for entry in logprobs[: len(sequence.tokens) - before]:  # none of what follows a stop string
                self._take_logprobs(sequence, entry)
            if found is not None:
                stops.append((key, found[1], found[0]))
                self._close(tracked, sequence, "stop", found[0])
            elif (sink := tracked.sink) is not None and key not in ends and sink.is_ready():
                sink.put_text(*sequence.take_delta())
                continue
            touched[key[0]] = tracked
        for (last, count), sequences in gaps.items():
            self.times.note(count, now, last, sequences)
        for end in outputs.finished:
            tracked = self._open.get(end.key[0])
            if tracked is not None and tracked.sequences[end.key[1]].finish_reason is None:
                touched[end.key[0]] = tracked
                tracked.error = end.message or tracked.error
                self._close(tracked, tracked.sequences[end.key[1]], end.reason, end.stop_reason)
        return [view for tracked in touched.values() if (view := self._next_output(tracked, now)) is not None], stops

    def _note_energy(self, energy: StepEnergy) -> None:
        for request_id, joules in zip(energy.requests, energy.joules, strict=True):
            if (tracked := self._open.get(request_id)) is not None:
                metrics = tracked.metrics
                metrics.joules += joules
                metrics.energy_source = energy.source
                metrics.energy_is_estimate |= energy.is_estimate

    def _note_drafts(self, keys: list[Key], drafts: list[int], counts: list[int]) -> None:
        for key, verified, count in zip(keys, drafts, counts, strict=True):
            if verified and (tracked := self._open.get(key[0])) is not None:
                tracked.metrics.num_draft_tokens += verified
                tracked.metrics.num_accepted_tokens += max(0, count - 1)

    def _take_plain(self, outputs: StepOutputs, now: float) -> Iterable[tuple[Key, list[int], list[TokenLogprobs]]]:
        """Append the tokens of plain requests (`TrackedRequest.is_plain`); return those of the others.

        In a large offline batch all requests are plain, and this loop is all that a step costs here.
        """
        if outputs.counts is not None or outputs.logprobs:
            return _each_key(outputs)
        opened = self._open
        others: list[tuple[Key, list[int], list[TokenLogprobs]]] = []
        for key, token in zip(outputs.keys, outputs.tokens, strict=True):
            tracked = opened.get(key[0])
            if tracked is None or not tracked.is_plain:
                others.append((key, [token], []))
                continue
            sequence = tracked.sequences[key[1]]
            if sequence.finish_reason is None:
                sequence.tokens.append(token)
                if not tracked.metrics.first_token_ts:
                    tracked.metrics.first_token_ts = now
        return others

    def _next_output(self, tracked: TrackedRequest, now: float) -> Output | None:
        """The request's output after this step; None if it has none before the end."""
        if tracked.open == 0:
            del self._open[tracked.request.id]
            if tracked.is_plain and not tracked.is_relayed:
                self._note_plain(tracked, now)
        elif tracked.is_relayed or tracked.request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        return tracked.view()

    def _close(
        self, tracked: TrackedRequest, sequence: TrackedSequence, reason: str, stop_reason: int | str | None
    ) -> None:
        sequence.close(reason, stop_reason)
        tracked.open -= 1
        metrics = tracked.metrics
        metrics.max_num_generation_tokens = max(metrics.max_num_generation_tokens, len(sequence.tokens))

    def _note_plain(self, tracked: TrackedRequest, now: float) -> None:
        """Metrics of a plain request, which were not noted token by token."""
        metrics = tracked.metrics
        metrics.last_token_ts = now
        metrics.num_generation_tokens = sum(len(sequence.tokens) for sequence in tracked.sequences)
        for sequence in tracked.sequences:
            self.times.note_whole(len(sequence.tokens), now - metrics.first_token_ts)

    def _take_logprobs(self, sequence: TrackedSequence, entry: TokenLogprobs) -> None:
        if sequence.logprobs is not None:
            sequence.logprobs.append(self._as_logprobs(entry))
            sequence.cumulative += entry.values[0]

    def _take_prompt_logprobs(self, tracked: TrackedRequest, entry: PromptLogprobs) -> None:
        if tracked.prompt_logprobs is not None:
            for offset, position in enumerate(entry.entries):
                tracked.prompt_logprobs[entry.start + offset] = self._as_logprobs(position)

    def _as_logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Logprobs by token id: the token itself first, then the best or the requested ones, which may include it."""
        text_of = _no_text if self.vocabulary is None else self.vocabulary.text_of
        ids, values = entry.ids, entry.values
        report = {ids[0]: Logprob(values[0], entry.rank, text_of(ids[0]))}
        ranks = entry.ranks or range(1, len(ids))
        for token, value, rank in zip(ids[1:], values[1:], ranks, strict=True):
            if token not in report:
                report[token] = Logprob(value, rank, text_of(token))
        return report


def _no_text(token: int) -> None:
    return None


def _each_key(outputs: StepOutputs) -> Iterator[tuple[Key, list[int], list[TokenLogprobs]]]:
    at, logprobs = 0, outputs.logprobs
    for i, key in enumerate(outputs.keys):
        end = at + (1 if outputs.counts is None else outputs.counts[i])
        yield key, outputs.tokens[at:end], [logprobs[j] for j in range(at, end) if j in logprobs] if logprobs else []
        at = end
