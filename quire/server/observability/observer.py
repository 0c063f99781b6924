"""What one request was and became, for those who watch: metrics, logs, traces.

`watching.py` makes an `HttpRecord` for each HTTP request and puts it in `current_record`. Whoever sends a request to
the engine makes a `Generation` of it:

    seen = server.observer.on_submit(request_id, params, prompt)
    try:
        async for output in llm.generate(...):
            seen.on_output(output)
    except QuireError:
        seen.on_finish("error")
        raise
    finally:
        seen.on_finish()  # what has ended stays ended; a request left in the middle was aborted

Nothing here costs a streamed token more than one assignment: the times of tokens are taken where tokens arrive
(`quire.output.times`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from quire.messages.outputs import RequestMetrics, RequestOutput
from quire.messages.pooling import PoolingParams
from quire.messages.sampling import SamplingParams

Params = SamplingParams | PoolingParams

ASKED_BY_MACHINES = frozenset(("/health", "/ready", "/metrics", "/load", "/ping", "/version"))
"""Routes that are asked every few seconds, and would drown the rest."""


class Generation:
    """One request to the engine, from its submission to its end."""

    def __init__(
        self,
        request_id: str,
        params: Params,
        prompt: str | list[int] | None,
        arrived: float,
        watches: Sequence[GenerationWatch],
    ) -> None:
        self.request_id = request_id
        self.params = params
        """How text is to be made, or a vector."""
        self.prompt = prompt
        self.arrived = arrived
        """When the server got it, in monotonic seconds: before templates and tokenizing."""
        self.ended = 0.0
        self.reason = ""
        """stop, length, abort or error, once it has ended."""
        self.output: RequestOutput | None = None
        """The last one that was read."""
        self._watches = watches

    def on_output(self, output: RequestOutput) -> None:
        """Something came. To be called for each output, or for those that are not swallowed at least."""
        is_first, self.output = self.output is None, output
        if is_first:
            for watch in self._watches:
                watch.on_first_output(self)

    def on_finish(self, reason: str | None = None) -> None:
        """It is over. Without a reason: as its last output says, else it was aborted. Only the first call counts."""
        if not self.reason:
            self.ended = time.monotonic()
            self.reason = reason or self._own_reason()
            for watch in self._watches:
                watch.on_finish(self)

    def _own_reason(self) -> str:
        reasons = self.finish_reasons
        if not reasons:
            return "abort"
        return next((bad for bad in ("error", "abort") if bad in reasons), reasons[0])

    @property
    def finish_reasons(self) -> list[str]:
        """How each sample ended, in index order; empty unless all of them have."""
        if self.output is None or not self.output.finished:
            return []
        return [sample.finish_reason or "abort" for sample in self.output.outputs]

    @property
    def metrics(self) -> RequestMetrics | None:
        """Its times, once something has come."""
        return None if self.output is None else self.output.metrics

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.output is None else len(self.output.prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        return 0 if self.output is None else self.output.num_cached_tokens or 0

    @property
    def output_tokens(self) -> int:
        """Tokens made so far, of all samples."""
        return 0 if self.metrics is None else self.metrics.num_generation_tokens

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival to the first token; None without one."""
        metrics = self.metrics
        return None if metrics is None or not metrics.first_token_ts else metrics.first_token_ts - self.arrived

    @property
    def queue_seconds(self) -> float | None:
        """From the engine's queue to the first step; None if that did not happen."""
        metrics = self.metrics
        return None if metrics is None or not metrics.scheduled_ts else max(0.0, metrics.queue_time)


@dataclass(slots=True)
class HttpRecord:
    """One HTTP request, as it is told about once it has been answered."""

    request_id: str
    method: str
    path: str
    handler: str
    """The route's path with its parameters unnamed, or "none": a label must not grow with what clients send."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those that carry a trace."""
    tenant: str = ""
    arrived: float = field(default_factory=time.monotonic)
    arrived_wall_ns: int = field(default_factory=time.time_ns)
    ended: float = 0.0
    status: int = 0
    """0: the client hung up before there was one."""
    generations: list[Generation] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.arrived

    @property
    def prompt_tokens(self) -> int:
        return sum(seen.prompt_tokens for seen in self.generations)

    @property
    def cached_tokens(self) -> int:
        return sum(seen.cached_tokens for seen in self.generations)

    @property
    def output_tokens(self) -> int:
        return sum(seen.output_tokens for seen in self.generations)

    @property
    def finish_reasons(self) -> list[str]:
        """How each sample ended; a request that did not come so far has one way for all of them."""
        return [reason for seen in self.generations for reason in (seen.finish_reasons or [seen.reason or "abort"])]

    @property
    def queue_seconds(self) -> float | None:
        """The longest wait of its requests to the engine; None where none was scheduled."""
        return _longest(seen.queue_seconds for seen in self.generations)

    @property
    def first_token_seconds(self) -> float | None:
        """The same for the first token."""
        return _longest(seen.first_token_seconds for seen in self.generations)


def _longest(seconds: Iterable[float | None]) -> float | None:
    return max((value for value in seconds if value is not None), default=None)


current_record: ContextVar[HttpRecord | None] = ContextVar("quire_request", default=None)
"""The HTTP request this task works for."""


class GenerationWatch(Protocol):
    """Who wants to know how requests to the engine go."""

    def on_submit(self, seen: Generation) -> None:
        """It goes to the engine."""

    def on_first_output(self, seen: Generation) -> None:
        """The first output came: prompt, cached tokens and first token are known."""

    def on_finish(self, seen: Generation) -> None:
        """It is over."""


class Observer:
    """Makes the records. One for each server."""

    def __init__(self, *watches: GenerationWatch) -> None:
        self._watches = watches

    def on_submit(self, request_id: str, params: Params, prompt: str | list[int] | None = None) -> Generation:
        """A request goes to the engine now. Its arrival is that of the HTTP request it is for, if it is for one."""
        record = current_record.get()
        arrived = time.monotonic() if record is None else record.arrived
        seen = Generation(request_id, params, prompt, arrived, self._watches)
        if record is not None:
            record.generations.append(seen)
        for watch in self._watches:
            watch.on_submit(seen)
        return seen
