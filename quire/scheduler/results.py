"""What a step's result means: tokens for requests, ends, blocks that can be found from now on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.messages.plan import StepResult, Vector
from quire.messages.request import Request
from quire.scheduler.beam_search import BeamRows
from quire.scheduler.draft import InFlightStep
from quire.scheduler.request_table import RequestTable

NOT_NUMBERS = "no token could be drawn: the model's logits are not numbers (NaN)"
NOTHING_TO_DRAW = (
    "no token could be drawn: the request excludes every token. What it allows, what it forbids and the form of its "
    "output leave none here"
)
NO_VECTOR = "there is no vector: the model's hidden states are not numbers (NaN or infinite)"


class ResultCollector:
    """Applies results to the ledger."""

    def __init__(self, ledger: RequestTable, branching: BeamRows) -> None:
        self._ledger = ledger
        self._branching = branching
        self._tables = ledger.tables
        self._rows = ledger.rows
        self._stats = ledger.stats

    def apply(self, flight: InFlightStep, result: StepResult) -> None:
        """Append the tokens of a step, end requests, release their blocks."""
        outputs = self._ledger.outputs
        for index, entry in result.prompt_logprobs.items():
            if not flight.requests[index].is_finished:
                outputs.prompt_logprobs.append((flight.requests[index].key, entry))
        live = self._rows.epoch[flight.rows] == flight.epochs
        is_odd = flight.has_beams or result.vectors or result.invalid.any()
        if live.all() and (result.counts == 1).all() and not is_odd:
            self._append_all(flight, result)
        else:
            self._append_each(flight, result, live)

    def _append_all(self, flight: InFlightStep, result: StepResult) -> None:
        """The common case: one token for every row of the step."""
        rows, tokens = flight.rows, result.tokens.tolist()
        for request, token in zip(flight.draws, tokens, strict=True):
            request.output.append(token)
        outputs = self._ledger.outputs
        outputs.logprobs.update({len(outputs.keys) + i: entry for i, entry in result.logprobs.items()})
        if outputs.counts is not None:
            outputs.counts += [1] * len(tokens)
        outputs.keys += [request.key for request in flight.draws]
        outputs.tokens += tokens
        known = self._rows.known[rows] + 1
        self._rows.known[rows] = known
        self._rows.held[rows] = False
        for i in np.flatnonzero((known - 1) % self._tables.block_size == 0).tolist():
            self._ledger.publish_output(flight.draws[i])
        for i in np.flatnonzero(result.stopped | (known >= self._rows.limit[rows])).tolist():
            self._end(flight.draws[i], tokens[i], bool(result.stopped[i]))
        self._stats.generated_tokens += len(tokens)

    def _append_each(self, flight: InFlightStep, result: StepResult, live: NDArray[np.bool_]) -> None:
        """Some rows ended, were preempted or failed since the launch, or yielded other than one token."""
        ends = np.cumsum(result.counts).tolist()
        for i, request in enumerate(flight.draws):
            if request.is_finished or not (live[i] or request.in_flight):
                continue
            if not live[i]:
                request.in_flight -= 1
            if (vector := result.vectors.get(i)) is not None:
                self._hand_over(request, vector)
                continue
            if result.invalid[i]:
                self._fail_to_draw(request)
                continue
            if request.beam is not None:
                self._branching.take(request, result.logprobs.get(i))
                continue
            tokens = result.tokens[ends[i] - int(result.counts[i]) : ends[i]].tolist()
            self._append(request, tokens, result, i)

    def _hand_over(self, request: Request, vector: Vector) -> None:
        """The request's prompt is computed, and this is what it was for."""
        if np.isfinite(vector).all():
            self._ledger.outputs.vectors.append((request.key, vector.tobytes()))
            self._ledger.finish(request, "stop")
        else:
            self._fail(request, NO_VECTOR)

    def _fail_to_draw(self, request: Request) -> None:
        params = request.params
        if params.allowed_token_ids or params.bad_words or params.min_tokens or params.structured_outputs:
            self._fail(request, NOTHING_TO_DRAW, error="ValidationError")
        else:
            self._fail(request, NOT_NUMBERS)

    def _fail(self, request: Request, message: str, error: str = "") -> None:
        self._tables.withdraw(request.blocks)  # nobody else shall read what led here
        if self._ledger.moving is not None:
            self._ledger.moving.tiers.discard(request.keys)
        self._ledger.finish(request, "error", message=message, error=error)

    def _append(self, request: Request, tokens: list[int], result: StepResult, index: int) -> None:
        outputs = self._ledger.outputs
        if outputs.counts is None:
            outputs.counts = [1] * len(outputs.keys)
        if index in result.logprobs:
            outputs.logprobs[len(outputs.keys)] = result.logprobs[index]
        outputs.keys.append(request.key)
        outputs.counts.append(len(tokens))
        outputs.tokens += tokens
        request.output += tokens
        self._stats.generated_tokens += len(tokens)
        if request.row >= 0:
            self._rows.known[request.row] = request.known
            self._rows.held[request.row] = False
            # One token was counted on at launch. All but a row's last token are computed, however many came.
            self._rows.bound[request.row] += len(tokens) - 1
            self._rows.computed[request.row] += len(tokens) - 1
            self._ledger.publish_output(request)
        if tokens and (result.stopped[index] or request.known >= request.source.limit):
            self._end(request, tokens[-1], bool(result.stopped[index]))

    def _end(self, request: Request, token: int, stopped: bool) -> None:
        source = request.source
        if not stopped:
            self._ledger.finish(request, "length")
        elif token in source.eos_ids and not source.params.ignore_eos:
            self._ledger.finish(request, "stop")
        else:
            self._ledger.finish(request, "stop", token)
