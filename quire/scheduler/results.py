"""Applies the result of a step: tokens for requests, ends, blocks for the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.messages.plan import StepResult, Vector
from quire.messages.request import Request
from quire.scheduler.beam_search import BeamRows
from quire.scheduler.request_table import RequestTable
from quire.scheduler.step_builder import InFlightStep

NAN_LOGITS = "no token could be drawn: the model's logits are not numbers (NaN)"
NO_TOKEN_ALLOWED = (
    "no token could be drawn: the request excludes every token. Its allowed_token_ids, bad_words, min_tokens and "
    "structured_outputs together leave none here"
)
NAN_VECTOR = "there is no vector: the model's hidden states are not numbers (NaN or infinite)"


class ResultCollector:
    """Applies results to the request table."""

    def __init__(self, requests: RequestTable, beams: BeamRows, in_flight: Sequence[InFlightStep]) -> None:
        """`in_flight`: launched steps after the one that is applied."""
        self._in_flight = in_flight
        self._requests = requests
        self._beams = beams
        self._rows = requests.rows

    def apply(self, step: InFlightStep, result: StepResult) -> None:
        """Append the tokens of a step, end requests, release their blocks."""
        for index, logprobs in result.prompt_logprobs.items():
            self._requests.report_prompt_logprobs(step.requests[index], logprobs)
        live = self._rows.epoch[step.rows] == step.epochs
        is_special = step.has_beams or result.vectors or result.invalid.any()
        if live.all() and not is_special and (result.counts == 1).all() and step.widths is None:
            self._append_all(step, result)
        elif live.all() and not is_special and (result.counts > 0).all() and step.widths is not None:
            self._append_runs(step, result, step.widths)
        else:
            self._append_each(step, result, live)

    def _append_all(self, step: InFlightStep, result: StepResult) -> None:
        """The common case: one token for every row of the step."""
        tokens = result.tokens.tolist()
        known = self._requests.append_one_each(step.draws, step.rows, tokens, result.logprobs)
        for i in np.flatnonzero(result.stopped | (known >= self._rows.limit[step.rows])).tolist():
            self._end(step.draws[i], tokens[i], bool(result.stopped[i]))

    def _append_runs(self, step: InFlightStep, result: StepResult, widths: NDArray[np.int64]) -> None:
        """One token or more for every row of the step, which has verified drafts."""
        tokens = result.tokens.tolist()
        known = self._requests.append_runs(step.draws, step.rows, tokens, result.counts, widths, result.logprobs)
        ended = np.flatnonzero(result.stopped | (known >= self._rows.limit[step.rows]))
        if len(ended):
            last = np.cumsum(result.counts) - 1
            for i in ended.tolist():
                self._end(step.draws[i], tokens[last[i]], bool(result.stopped[i]))

    def _append_each(self, step: InFlightStep, result: StepResult, live: NDArray[np.bool_]) -> None:
        """Some rows ended, were preempted or failed since the launch, or yielded other than one token."""
        ends = np.cumsum(result.counts).tolist()
        for i, request in enumerate(step.draws):
            if request.is_finished or not (live[i] or request.in_flight):
                continue
            if not live[i] and self._requests.collect_stale(request):
                continue
            if (vector := result.vectors.get(i)) is not None:
                self._collect_vector(request, vector)
            elif result.invalid[i] and result.counts[i] < 2:
                self._fail_draw(request)
            elif request.beam is not None:
                self._beams.collect(request, result.logprobs.get(ends[i] - 1) if result.counts[i] else None)
            else:
                start = ends[i] - int(result.counts[i])
                tokens = result.tokens[start : ends[i]].tolist()
                if not tokens and self._requests.tables.state_pages:
                    self._restart(request)
                    continue
                if result.invalid[i]:
                    tokens.pop()
                logprobs = {at: entry for at in range(len(tokens)) if (entry := result.logprobs.get(start + at))}
                self._requests.append(request, tokens, logprobs, step.width_of(i))
                if result.invalid[i]:
                    self._restart(request)
                elif tokens and (result.stopped[i] or request.known >= request.source.limit):
                    self._end(request, tokens[-1], bool(result.stopped[i]))

    def _restart(self, request: Request) -> None:
        """The request leaves its row and starts again from its known tokens; what it has drawn since is wrong.

        Either its draw yielded nothing, and its recurrent state is a token ahead: it cannot compute the token again. Or
        no token could be drawn behind a draft that was accepted, and the device has ended the row: what happens there
        is found out as without drafts, in a step that begins there.
        """
        if request.row >= 0:
            row, epoch = request.row, int(self._rows.epoch[request.row])
            self._requests.restart(request)
            request.in_flight = sum(step.draws_for(row, epoch) for step in self._in_flight)
        request.discards = request.in_flight > 0

    def _collect_vector(self, request: Request, vector: Vector) -> None:
        if np.isfinite(vector).all():
            self._requests.finish_pooling(request, vector)
        else:
            self._fail(request, NAN_VECTOR)

    def _fail_draw(self, request: Request) -> None:
        params = request.params
        if params.allowed_token_ids or params.bad_words or params.min_tokens or params.structured_outputs:
            self._fail(request, NO_TOKEN_ALLOWED, error="ValidationError")
        else:
            self._fail(request, NAN_LOGITS)

    def fail(self, request: Request, message: str, error: str = "") -> None:
        """End a request with its siblings that wait for its prompt, as `_fail` does, if it has not ended."""
        for sequence in (request, *request.siblings):
            if not sequence.is_finished:
                self._fail(sequence, message, error)

    def _fail(self, request: Request, message: str, error: str = "") -> None:
        """End the request with an error, and drop its KV from all caches."""
        # No other request may read the KV that led here.
        self._requests.tables.withdraw_owner(request, request.keys)
        self._requests.swapper.forget(request.keys)
        self._requests.finish(request, "error", message=message, error=error)

    def _end(self, request: Request, token: int, stopped: bool) -> None:
        if not stopped:
            self._requests.finish(request, "length", is_seen=True)
        else:
            self._requests.finish(request, "stop", request.source.stop_reason(token), is_seen=True)
