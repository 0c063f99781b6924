"""Limits on the queue, in sequences and prompt tokens, on request bodies, and on the work they make."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from quire.api.work_pool import WorkPool
from quire.messages.json_limits import JsonLimits
from quire.server.errors import ApiError, retry_text

REMEMBERED_ENDS = 64
LONGEST_RETRY_SECONDS = 60.0
BODY_VALUES = 1 << 18
"""Default of max_body_values: so many are decoded in 20 ms. Long prompts of token ids need more."""
BODY_DEPTH = 80
"""Free-form fields may be nested to 64 levels, a few levels below the body."""
OPEN_BODY_BYTES, OPEN_BODY_SIZES = 256 << 20, 8
"""Default of max_open_body_bytes; at least so many sizes of the longest body."""


@dataclass(frozen=True)
class RequestLimits:
    """What one request may send, and where its work is done."""

    max_body: int
    """Bytes."""
    stall: float
    """Seconds without progress."""
    bodies: OpenBodies
    json: JsonLimits
    work: WorkPool
    strict_fields: bool = False
    """Whether fields that nothing reads are refused."""


class OpenBodies:
    """Limits the bytes of all request bodies held at once. Each body also has its own limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        """Bytes of the bodies of all open requests."""

    def take(self, size: int) -> None:
        """Hold `size` more bytes, or raise 429. If nothing is held, any size is accepted."""
        if self.held and self.held + size > self._most:
            raise ApiError(
                429,
                f"the server is busy: it holds {self.held} bytes of request bodies; at most {self._most} "
                "(--max-open-body-bytes). Try again later",
                headers={"Retry-After": retry_text(1.0), "Connection": "close"},
            )
        self.held += size

    def release(self, size: int) -> None:
        """Release the bytes of a request that has ended."""
        self.held -= size


class QueueTicket:
    """An admitted request. `start` at its first output, `leave` at its end; both may be called again."""

    def __init__(self, admission: AdmissionLimiter, sequences: int, tokens: int) -> None:
        self._admission = admission
        self._sequences = sequences
        self._tokens = tokens

    def start(self) -> None:
        """The request no longer waits."""
        self._admission.queued_tokens -= self._tokens
        self._tokens = 0

    def leave(self) -> None:
        """The request has ended."""
        self.start()
        if self._sequences:
            self._admission.sequences -= self._sequences
            self._sequences = 0
            self._admission.requests -= 1
            self._admission.note_end()


class AdmissionLimiter:
    """Counts admitted requests. The engine runs `rows` sequences at once; the rest are the queue."""

    def __init__(self, rows: int, max_requests: int, max_tokens: int) -> None:
        self._rows = rows
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.requests = 0
        """Admitted and not ended."""
        self.sequences = 0
        """Of all admitted requests that have not ended."""
        self.queued_tokens = 0
        """Prompt tokens of requests without an output yet."""
        self.rejected = {"requests": 0, "tokens": 0}
        """Rejections, by the limit that was reached."""
        self._ends: deque[float] = deque(maxlen=REMEMBERED_ENDS)

    def enter(self, sizes: Sequence[tuple[int, int]]) -> list[QueueTicket]:
        """Admit requests, given as (sequences, prompt tokens), all or none; raises 429.

        If the server is empty, any size is admitted.
        """
        sequences, tokens = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        waiting = max(0, self.sequences - self._rows)
        if self.sequences and self.sequences + sequences > self._rows + self._max_requests:
            raise self._full("requests", f"{waiting} requests are waiting; at most {self._max_requests} may", waiting)
        if self.queued_tokens and self.queued_tokens + tokens > self._max_tokens:
            what = f"{self.queued_tokens} prompt tokens are waiting; at most {self._max_tokens} may"
            raise self._full("tokens", what, waiting)
        self.requests += len(sizes)
        self.sequences += sequences
        self.queued_tokens += tokens
        return [QueueTicket(self, *size) for size in sizes]

    def note_end(self) -> None:
        """A request has ended."""
        self._ends.append(time.monotonic())

    def retry_after(self, waiting: int) -> float:
        """Estimated seconds until half of the queue has run, at the rate of the last requests that ended."""
        if len(self._ends) < 2:
            return 1.0
        rate = len(self._ends) / max(0.001, time.monotonic() - self._ends[0])
        return min(LONGEST_RETRY_SECONDS, max(1.0, 0.5 * waiting / rate))

    def _full(self, limit: str, what: str, waiting: int) -> ApiError:
        self.rejected[limit] += 1
        seconds = self.retry_after(waiting)
        return ApiError(
            429, f"the server is busy: {what}. Try again later", headers={"Retry-After": retry_text(seconds)}
        )
