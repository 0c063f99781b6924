"""From what steps yield to what users see."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np

from quire.messages.beams import BeamSearchParams, Hypothesis
from quire.messages.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Finished,
    Key,
    Logprob,
    Output,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    StepOutputs,
)
from quire.messages.plan import PromptLogprobs, TokenLogprobs
from quire.messages.pooling import PoolingParams
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind
from quire.output.beams import sequence_of
from quire.output.detokenizer import Detokenizer, Vocabulary
from quire.output.pooling import finished_vector
from quire.output.stops import StopStrings
from quire.output.times import TokenTimes


class Sample:
    """One sample of a request: its tokens, its text, how it ended."""

    def __init__(self, request: NewRequest, index: int, vocabulary: Vocabulary | None) -> None:
        params = request.params
        self.index = index
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.last_ts = 0.0
        """When its last token came; 0 before the first."""
        self._params = params
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._detokenizer: Detokenizer | None = None
        if vocabulary is not None and params.detokenize:
            self._detokenizer = vocabulary.detokenizer(
                request.prompt, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        self._given_tokens = 0
        self._given_text = 0

    def append(self, tokens: list[int], end: Finished | None) -> tuple[str, int] | None:
        """Take new tokens; returns (stop string, number of tokens up to it) if one completed."""
        if self._detokenizer is None:
            self.tokens += tokens
            return None
        for position, token in enumerate(tokens):
            self.tokens.append(token)
            is_stop_token = end is not None and end.reason == "stop" and position == len(tokens) - 1
            new = (
                "" if is_stop_token and not self._params.include_stop_str_in_output else self._detokenizer.push([token])
            )
            found = self._take_text(new)
            if found is not None:
                return found, len(self.tokens)
        return None

    def close(self, reason: str, stop_reason: int | str | None) -> None:
        """The sample has ended."""
        if self._detokenizer is not None and not (reason == "stop" and isinstance(stop_reason, str)):
            self.text += self._detokenizer.flush()
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _take_text(self, new: str) -> str | None:
        # Held by one name alone a string grows in place; added to as an attribute it would be copied for every token.
        text, self.text = self.text, ""
        text += new
        self.text = text
        if not self._params.stop or len(self.tokens) <= self._params.min_tokens:
            return None
        found = self._stops.find(self.text, len(new))
        if found is None:
            return None
        self.text = self.text[: found[1]]
        return found[0]

    def view(self, delta: bool) -> CompletionOutput:
        """The sample as the user sees it: everything so far, or what is new since the last view."""
        shown = len(self.text) if self.finish_reason else max(self._given_text, len(self.text) - self._stops.held)
        since_token, since_text = (self._given_tokens, self._given_text) if delta else (0, 0)
        self._given_tokens, self._given_text = len(self.tokens), shown
        return CompletionOutput(
            index=self.index,
            text=self.text[since_text:shown],
            token_ids=self.tokens[since_token:],
            cumulative_logprob=None if self.logprobs is None else self.cumulative,
            logprobs=None if self.logprobs is None else self.logprobs[since_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Tracked:
    """A request whose outputs are being gathered."""

    def __init__(self, request: NewRequest, prompt: str | None, vocabulary: Vocabulary | None) -> None:
        self.request = request
        self.prompt = prompt
        self.samples = [Sample(request, index, vocabulary) for index in range(request.params.n)]
        self.open = len(self.samples)
        params = request.params
        self.is_plain = (
            params.output_kind is RequestOutputKind.FINAL_ONLY
            and params.logprobs is None
            and (vocabulary is None or not params.detokenize)
        )
        """Nothing is to be told before the end, and tokens are all there is to tell."""
        self.num_cached: int | None = None
        self.error: str | None = None
        self.metrics = RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic())
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(request.prompt)

    def _take_prompt_logprobs(self, once: bool) -> list[dict[int, Logprob] | None] | None:
        """What is known of the prompt; with `once` only the first time."""
        taken = self.prompt_logprobs
        if once:
            self.prompt_logprobs = None
        return taken

    def view(self) -> Output:
        """The request as the user sees it."""
        delta = self.request.params.output_kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self.request.id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt,
            outputs=[sample.view(delta) for sample in self.samples],
            finished=self.open == 0,
            prompt_logprobs=self._take_prompt_logprobs(delta),
            metrics=self.metrics,
            num_cached_tokens=self.num_cached,
            error=self.error,
        )


class TrackedPooling(Tracked):
    """A request whose vector is being waited for."""

    def __init__(self, request: NewRequest, pooling: PoolingParams, prompt: str | None) -> None:
        super().__init__(request, prompt, None)
        self._pooling = pooling
        self._vector = np.empty(0, np.float32)

    def take_vector(self, data: bytes) -> None:
        """It has come."""
        self._vector = finished_vector(data, self._pooling)

    def view(self) -> PoolingRequestOutput:
        """The request as the user sees it."""
        return PoolingRequestOutput(
            request_id=self.request.id,
            outputs=PoolingOutput(self._vector),
            prompt_token_ids=self.request.prompt,
            num_cached_tokens=self.num_cached,
            finished=self.open == 0,
            finish_reason=self.samples[0].finish_reason,
            error=self.error,
            metrics=self.metrics,
        )


class TrackedSearch(Tracked):
    """A beam search whose sequences are being waited for."""

    def __init__(
        self, request: NewRequest, search: BeamSearchParams, prompt: str | None, vocabulary: Vocabulary | None
    ) -> None:
        super().__init__(request, prompt, None)
        self._search = search
        self._vocabulary = vocabulary
        self._sequences: list[BeamSearchSequence] = []

    def take(self, found: list[Hypothesis], now: float) -> None:
        """They have come."""
        self._sequences = [sequence_of(one, self.request, self._search, self._vocabulary) for one in found]
        lengths = [len(one.tokens) for one in found]
        self.metrics.last_token_ts = now
        self.metrics.first_token_ts = self.metrics.first_token_ts or now
        self.metrics.num_generation_tokens = sum(lengths)
        self.metrics.max_num_generation_tokens = max(lengths, default=0)

    def view(self) -> BeamSearchOutput:
        """The search as the user sees it."""
        return BeamSearchOutput(
            sequences=self._sequences,
            request_id=self.request.id,
            prompt_token_ids=self.request.prompt,
            num_cached_tokens=self.num_cached,
            finished=self.open == 0,
            finish_reason=self.samples[0].finish_reason,
            error=self.error,
            metrics=self.metrics,
        )


class OutputProcessor:
    """Gathers the outputs of all open requests."""

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        self.vocabulary = vocabulary
        """What makes text of tokens; without it there is none."""
        self._open: dict[str, Tracked] = {}
        self.times = TokenTimes()

    def add(self, request: NewRequest, prompt: str | None) -> None:
        """Outputs of this request will come."""
        if request.pooling is not None:
            self._open[request.id] = TrackedPooling(request, request.pooling, prompt)
        elif request.beams is not None:
            self._open[request.id] = TrackedSearch(request, request.beams, prompt, self.vocabulary)
        else:
            self._open[request.id] = Tracked(request, prompt, self.vocabulary)

    def begin_again(self, request_id: str) -> Tracked:
        """The request is computed anew: what has come of it is forgotten, but for when it arrived."""
        before = self._open[request_id]
        self.add(before.request, before.prompt)
        tracked = self._open[request_id]
        tracked.metrics.arrival_time, tracked.metrics.queued_ts = before.metrics.arrival_time, before.metrics.queued_ts
        return tracked

    def tracked(self, request_id: str) -> Tracked:
        """An open request, as far as it has come."""
        return self._open[request_id]

    def forget(self, request_id: str) -> None:
        """Nobody wants this request's outputs any more."""
        self._open.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def process(self, outputs: StepOutputs) -> tuple[list[Output], list[tuple[Key, int, str]]]:
        """What users get to see of a step, and the samples that end here: (key, tokens up to the end, stop string)."""
        now = time.monotonic()
        ends = {end.key: end for end in outputs.finished}
        stops: list[tuple[Key, int, str]] = []
        touched: dict[str, Tracked] = {}
        for started in outputs.started:
            if (tracked := self._open.get(started.key[0])) is not None and started.key[1] == 0:
                tracked.num_cached = started.num_cached
                tracked.metrics.scheduled_ts = started.at
        for key in outputs.preempted:
            if (tracked := self._open.get(key[0])) is not None:
                tracked.metrics.preemptions += 1
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
            if tracked is None or not tokens or tracked.samples[key[1]].finish_reason is not None:
                continue
            sample = tracked.samples[key[1]]
            touched[key[0]] = tracked
            self._note_time(tracked, sample, len(tokens), now)
            if logprobs is not None:
                self._take_logprobs(sample, logprobs)
            found = sample.append(tokens, ends.get(key))
            if found is not None:
                stops.append((key, found[1], found[0]))
                self._close(tracked, sample, "stop", found[0])
        for end in outputs.finished:
            tracked = self._open.get(end.key[0])
            if tracked is not None and tracked.samples[end.key[1]].finish_reason is None:
                touched[end.key[0]] = tracked
                tracked.error = end.message or tracked.error
                self._close(tracked, tracked.samples[end.key[1]], end.reason, end.stop_reason)
        return [view for tracked in touched.values() if (view := self._show(tracked, now)) is not None], stops

    def _take_plain(self, outputs: StepOutputs, now: float) -> Iterable[tuple[Key, list[int], TokenLogprobs | None]]:
        """Append the tokens of requests that want nothing but their tokens, at their end; the others' are returned.

        A large batch offline is all of that kind, and this loop all that happens to it in a step.
        """
        if outputs.counts is not None or outputs.logprobs:
            return _each_key(outputs)
        opened, others = self._open, []
        for key, token in zip(outputs.keys, outputs.tokens, strict=True):
            tracked = opened.get(key[0])
            if tracked is None or not tracked.is_plain:
                others.append((key, [token], None))
                continue
            sample = tracked.samples[key[1]]
            if sample.finish_reason is None:
                sample.tokens.append(token)
                if not tracked.metrics.first_token_ts:
                    tracked.metrics.first_token_ts = now
        return others

    def _show(self, tracked: Tracked, now: float) -> Output | None:
        if tracked.open == 0:
            del self._open[tracked.request.id]
            if tracked.is_plain:
                self._note_plain(tracked, now)
        elif tracked.request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        return tracked.view()

    def _close(self, tracked: Tracked, sample: Sample, reason: str, stop_reason: int | str | None) -> None:
        sample.close(reason, stop_reason)
        tracked.open -= 1
        metrics = tracked.metrics
        metrics.max_num_generation_tokens = max(metrics.max_num_generation_tokens, len(sample.tokens))

    def _note_time(self, tracked: Tracked, sample: Sample, count: int, now: float) -> None:
        metrics = tracked.metrics
        metrics.first_token_ts = metrics.first_token_ts or now
        metrics.last_token_ts = now
        metrics.num_generation_tokens += count
        if not tracked.is_plain:
            self.times.note(count, now, sample.last_ts)
            sample.last_ts = now

    def _note_plain(self, tracked: Tracked, now: float) -> None:
        """What was not noted token by token."""
        metrics = tracked.metrics
        metrics.last_token_ts = now
        metrics.num_generation_tokens = sum(len(sample.tokens) for sample in tracked.samples)
        for sample in tracked.samples:
            self.times.note_whole(len(sample.tokens), now - metrics.first_token_ts)

    def _take_logprobs(self, sample: Sample, entry: TokenLogprobs) -> None:
        if sample.logprobs is not None:
            sample.logprobs.append(self._report(entry))
            sample.cumulative += entry.values[0]

    def _take_prompt_logprobs(self, tracked: Tracked, entry: PromptLogprobs) -> None:
        if tracked.prompt_logprobs is not None:
            for offset, position in enumerate(entry.entries):
                tracked.prompt_logprobs[entry.start + offset] = self._report(position)

    def _report(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token itself first, then the best ones; the token's own rank may lie among theirs."""
        text_of = _no_text if self.vocabulary is None else self.vocabulary.text_of
        ids, values = entry.ids, entry.values
        report = {ids[0]: Logprob(values[0], entry.rank, text_of(ids[0]))}
        for rank in range(1, len(ids)):
            if (token := ids[rank]) not in report:
                report[token] = Logprob(values[rank], rank, text_of(token))
        return report


def _no_text(token: int) -> None:
    return None


def _each_key(outputs: StepOutputs) -> Iterator[tuple[Key, list[int], TokenLogprobs | None]]:
    at = 0
    for i, key in enumerate(outputs.keys):
        count = 1 if outputs.counts is None else outputs.counts[i]
        yield key, outputs.tokens[at : at + count], outputs.logprobs.get(i)
        at += count
