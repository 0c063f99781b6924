"""The outputs of one request as they are gathered: its sequences, its vector, or its beam search's hypotheses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.messages.beams import BeamSearchParams, Hypothesis
from quire.messages.lora import lora_request_of
from quire.messages.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Finished,
    FlatLogprobs,
    Logprob,
    Output,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from quire.messages.pooling import PoolingParams
from quire.messages.request import NewRequest
from quire.messages.sampling import RequestOutputKind
from quire.output.beams import sequence_of
from quire.output.detokenizer import Detokenizer, Vocabulary


class TextSink(Protocol):
    """Takes the new text of a streamed sequence as it comes, so that no output has to be made of it."""

    def is_ready(self) -> bool:
        """Whether it takes text now; if not, an output is made."""
        ...

    def put_text(self, text: str, tokens: int) -> None:
        """Text that `tokens` new tokens have completed; it may be empty."""
        ...


class StopStrings:
    """Searches one sequence's text, across tokens, for the strings that end it."""

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self._strings = strings
        self._include = include
        self._last_characters = frozenset(string[-1] for string in strings)
        self.held = max((len(string) for string in strings), default=1) - 1 if not include else 0
        """Characters at the end of the text that may begin a stop string and are held back."""

    def find(self, text: str, new: int) -> tuple[str, int] | None:
        """The stop string that completes first within the last `new` characters, and where the text then ends.

        Of two that complete at the same character, the first in the list wins.
        """
        if not new or self._last_characters.isdisjoint(text[-new:]):
            return None
        best: tuple[int, int, str] | None = None
        for order, string in enumerate(self._strings):
            at = text.find(string, max(0, len(text) - new - len(string) + 1))
            if at >= 0 and (best is None or (at + len(string), order) < best[:2]):
                best = (at + len(string), order, string)
        if best is None:
            return None
        end, _, string = best
        return string, end if self._include else end - len(string)


class TrackedSequence:
    """One sequence of a request: its tokens, its text, how it ended."""

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
        """When its last token came (monotonic seconds); 0 before the first."""
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
        """The sequence has ended."""
        if self._detokenizer is not None and not (reason == "stop" and isinstance(stop_reason, str)):
            self.text += self._detokenizer.flush()
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _take_text(self, new: str) -> str | None:
        # A string with one reference grows in place; appended to as an attribute it would be copied for every token.
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

    def take_delta(self) -> tuple[str, int]:
        """The text that is new since the last call or view, and the number of its tokens."""
        shown = max(self._given_text, len(self.text) - self._stops.held)
        text, count = self.text[self._given_text : shown], len(self.tokens) - self._given_tokens
        self._given_tokens, self._given_text = len(self.tokens), shown
        return text, count

    def _given_logprobs(self, delta: bool) -> list[dict[int, Logprob]] | FlatLogprobs | None:
        if self.logprobs is None:
            return None
        given = self.logprobs if delta else list(self.logprobs)
        if delta:
            self.logprobs = []  # a long stream would hold an object for every one it has sent
        return FlatLogprobs.of(given) if self._params.flat_logprobs else given

    def view(self, delta: bool) -> CompletionOutput:
        """The sequence's output: everything so far, or what is new since the last call."""
        shown = len(self.text) if self.finish_reason else max(self._given_text, len(self.text) - self._stops.held)
        since_token, since_text = (self._given_tokens, self._given_text) if delta else (0, 0)
        self._given_tokens, self._given_text = len(self.tokens), shown
        return CompletionOutput(
            index=self.index,
            text=self.text[since_text:shown],
            token_ids=self.tokens[since_token:],
            cumulative_logprob=None if self.logprobs is None else self.cumulative,
            logprobs=self._given_logprobs(delta),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class TrackedRequest:
    """A request whose outputs are gathered."""

    is_relayed = False
    """Whether another front process makes its outputs."""

    def __init__(self, request: NewRequest, prompt: str | None, vocabulary: Vocabulary | None) -> None:
        self.request = request
        self.prompt = prompt
        self.sequences = [TrackedSequence(request, index, vocabulary) for index in range(request.params.n)]
        self.open = len(self.sequences)
        self.sink: TextSink | None = None
        """Takes the text of a request with one sequence, without logprobs, until it ends."""
        params = request.params
        self.is_plain = (
            params.output_kind is RequestOutputKind.FINAL_ONLY
            and params.logprobs is None
            and (vocabulary is None or not params.detokenize)
        )
        """Whether the only output is at the end, and has only tokens."""
        self.num_cached: int | None = None
        self.error: str | None = None
        self.metrics = RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic())
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(request.prompt)

    def note_tokens(self, count: int, now: float) -> None:
        """`count` more tokens have come."""
        metrics = self.metrics
        metrics.first_token_ts = metrics.first_token_ts or now
        metrics.last_token_ts = now
        metrics.num_generation_tokens += count

    def continued(self) -> NewRequest:
        """The request with the tokens it has, for an engine that goes on from there."""
        request = self.request
        drawn = [None if one.finish_reason is not None else list(one.tokens) for one in self.sequences]
        if not any(tokens is None or tokens for tokens in drawn):
            return msgspec.structs.replace(request, drawn=[[]]) if request.session else request
        if request.params.prompt_logprobs is None:
            return msgspec.structs.replace(request, drawn=drawn)
        params = msgspec.structs.replace(request.params, prompt_logprobs=None)  # they came before the first token
        return msgspec.structs.replace(request, drawn=drawn, params=params, reads_cache=True)

    def _take_prompt_logprobs(self, once: bool) -> list[dict[int, Logprob] | None] | FlatLogprobs | None:
        """The prompt's logprobs so far; with `once`, only at the first call."""
        taken = self.prompt_logprobs
        if once:
            self.prompt_logprobs = None
        return taken if taken is None or not self.request.params.flat_logprobs else FlatLogprobs.of(taken)

    def view(self) -> Output:
        """The request as the user sees it."""
        delta = self.request.params.output_kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self.request.id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt,
            outputs=[sequence.view(delta) for sequence in self.sequences],
            finished=self.open == 0,
            prompt_logprobs=self._take_prompt_logprobs(delta),
            metrics=self.metrics,
            num_cached_tokens=self.num_cached,
            lora_request=lora_request_of(self.request.adapters) if self.request.adapters else None,
            error=self.error,
        )


class TrackedRelay(TrackedRequest):
    """A request of another front process: only its tokens are gathered, so that it can go on at another engine."""

    is_relayed = True

    def __init__(self, request: NewRequest) -> None:
        super().__init__(request, None, None)
        self.is_plain = True
        self.prompt_logprobs = None
        for sequence in self.sequences:
            sequence.logprobs = None


class TrackedPooling(TrackedRequest):
    """A pooling request that waits for its vector."""

    def __init__(self, request: NewRequest, pooling: PoolingParams, prompt: str | None) -> None:
        super().__init__(request, prompt, None)
        self._pooling = pooling
        self._vector = np.empty(0, np.float32)

    def take_vector(self, data: bytes) -> None:
        """The vector has arrived."""
        self._vector = finished_vector(data, self._pooling)

    def view(self) -> PoolingRequestOutput:
        """The request as the user sees it."""
        return PoolingRequestOutput(
            request_id=self.request.id,
            outputs=PoolingOutput(self._vector),
            prompt_token_ids=self.request.prompt,
            num_cached_tokens=self.num_cached,
            finished=self.open == 0,
            finish_reason=self.sequences[0].finish_reason,
            error=self.error,
            metrics=self.metrics,
        )


class TrackedSearch(TrackedRequest):
    """A beam search that waits for its sequences."""

    def __init__(
        self, request: NewRequest, search: BeamSearchParams, prompt: str | None, vocabulary: Vocabulary | None
    ) -> None:
        super().__init__(request, prompt, None)
        self._search = search
        self._vocabulary = vocabulary
        self._found: list[BeamSearchSequence] = []

    def take(self, found: list[Hypothesis], now: float) -> None:
        """The sequences have arrived."""
        self._found = [sequence_of(one, self.request, self._search, self._vocabulary) for one in found]
        lengths = [len(one.tokens) for one in found]
        self.metrics.last_token_ts = now
        self.metrics.first_token_ts = self.metrics.first_token_ts or now
        self.metrics.num_generation_tokens = sum(lengths)
        self.metrics.max_num_generation_tokens = max(lengths, default=0)

    def view(self) -> BeamSearchOutput:
        """The search's output."""
        return BeamSearchOutput(
            sequences=self._found,
            request_id=self.request.id,
            prompt_token_ids=self.request.prompt,
            num_cached_tokens=self.num_cached,
            finished=self.open == 0,
            finish_reason=self.sequences[0].finish_reason,
            error=self.error,
            metrics=self.metrics,
        )


def finished_vector(data: bytes, params: PoolingParams) -> NDArray[np.float32]:
    """A pooled vector cut to `dimensions`, after its activation. A zero vector stays zero."""
    vector = np.frombuffer(data, np.float32)[: params.dimensions]
    if not params.is_activated or params.activation == "none":
        return vector.copy()
    wide = vector.astype(np.float64)
    if params.activation == "softmax":
        powers = np.exp(wide - wide.max())
        return (powers / powers.sum()).astype(np.float32)
    if params.activation == "sigmoid":
        return (0.5 * (1 + np.tanh(0.5 * wide))).astype(np.float32)  # overflows nowhere
    length = np.linalg.norm(wide)
    return (vector / length).astype(np.float32) if length else vector.copy()
