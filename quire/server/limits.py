"""Limits on the queue, in sequences and prompt tokens, on request bodies, and on the work they make."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.api.work_pool import WorkPool
from quire.messages.json_limits import JsonLimits
from quire.server.errors import ApiError, retry_text
from quire.server.fronts.counts import Count, FrontCounts
from quire.server.lifecycle.loop_turns import LoopTurns

REMEMBERED_ENDS = 64
LONGEST_RETRY_SECONDS = 60.0
BODY_VALUES = 1 << 18
"""Default of max_body_values: so many are decoded in 20 ms. Long prompts of token ids need more."""
BODY_DEPTH = 80
"""Free-form fields may be nested to 64 levels, a few levels below the body."""
BODY_BYTES = 8 << 20
"""Default of max_body_bytes, for text."""
BODY_IMAGES = 2
"""The largest images that a body has room for besides, if the model takes images; in base64 they are a third longer."""
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
    media_work: WorkPool
    """Where requests with images are prepared."""
    strict_fields: bool = False
    """Whether fields that nothing reads are refused."""
    turns: LoopTurns = field(default_factory=LoopTurns)
    """Of requests that arrive at once."""


class OpenBodies:
    """Limits the bytes of all request bodies held at once. Each body also has its own limit."""

    def __init__(self, most: int, counts: FrontCounts | None = None) -> None:
        self._most = most
        self._counts = FrontCounts() if counts is None else counts

    @property
    def held(self) -> int:
        """Bytes of the bodies of all open requests."""
        return self._counts.total(Count.BODY_BYTES)

    def take(self, size: int) -> None:
        """Hold `size` more bytes, or raise 429. If nothing is held, any size is accepted."""
        self._counts.add(Count.BODY_BYTES, size)
        held = self.held - size
        if held and held + size > self._most:
            self.release(size)
            raise ApiError(
                429,
                f"the server is busy: it holds {held} bytes of request bodies; at most {self._most} "
                "(--max-open-body-bytes). Try again later",
                headers={"Retry-After": retry_text(1.0), "Connection": "close"},
            )

    def release(self, size: int) -> None:
        """Release the bytes of a request that has ended."""
        self._counts.add(Count.BODY_BYTES, -size)


class QueueTicket:
    """An admitted request. `start` at its first output, `leave` at its end; both may be called again."""

    def __init__(self, admission: AdmissionLimiter, sequences: int, tokens: int) -> None:
        self._admission = admission
        self._sequences = sequences
        self._tokens = tokens

    def start(self) -> None:
        """The request no longer waits."""
        if self._tokens:
            self._admission.counts.add(Count.QUEUED_TOKENS, -self._tokens)
            self._tokens = 0

    def leave(self) -> None:
        """The request has ended."""
        self.start()
        if self._sequences:
            self._admission.counts.add(Count.SEQUENCES, -self._sequences)
            self._admission.counts.add(Count.REQUESTS, -1)
            self._sequences = 0
            self._admission.note_end()


class AdmissionLimiter:
    """Counts admitted requests. The engine runs `rows` sequences at once; the rest are the queue."""

    def __init__(self, rows: int, max_requests: int, max_tokens: int, counts: FrontCounts | None = None) -> None:
        self._rows = rows
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.counts = FrontCounts() if counts is None else counts
        self._ends: deque[float] = deque(maxlen=REMEMBERED_ENDS)

    @property
    def requests(self) -> int:
        """Admitted and not ended."""
        return self.counts.total(Count.REQUESTS)

    @property
    def sequences(self) -> int:
        """Of all admitted requests that have not ended."""
        return self.counts.total(Count.SEQUENCES)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests without an output yet."""
        return self.counts.total(Count.QUEUED_TOKENS)

    @property
    def rejected(self) -> dict[str, int]:
        """Rejections, by the limit that was reached."""
        total = self.counts.total
        return {"requests": total(Count.REJECTED_REQUESTS), "tokens": total(Count.REJECTED_TOKENS)}

    def enter(self, sizes: Sequence[tuple[int, int]]) -> list[QueueTicket]:
        """Admit requests, given as (sequences, prompt tokens), all or none; raises 429.

        If the server is empty, any size is admitted.
        """
        sequences, tokens = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        self._count(len(sizes), sequences, tokens)
        before, queued = self.sequences - sequences, self.queued_tokens - tokens
        waiting = max(0, before - self._rows)
        full = None
        if before and before + sequences > self._rows + self._max_requests:
            what = f"{waiting} requests are waiting; at most {self._max_requests} may"
            full = self._full(Count.REJECTED_REQUESTS, what, waiting)
        elif queued and queued + tokens > self._max_tokens:
            what = f"{queued} prompt tokens are waiting; at most {self._max_tokens} may"
            full = self._full(Count.REJECTED_TOKENS, what, waiting)
        if full is not None:
            self._count(-len(sizes), -sequences, -tokens)
            raise full
        return [QueueTicket(self, *size) for size in sizes]

    def _count(self, requests: int, sequences: int, tokens: int) -> None:
        self.counts.add(Count.REQUESTS, requests)
        self.counts.add(Count.SEQUENCES, sequences)
        self.counts.add(Count.QUEUED_TOKENS, tokens)

    def note_end(self) -> None:
        """A request has ended."""
        self._ends.append(time.monotonic())

    def retry_after(self, waiting: int) -> float:
        """Estimated seconds until half of the queue has run, at the rate of the last requests that ended. Other fronts
        are expected to end as many as this one."""
        if len(self._ends) < 2:
            return 1.0
        rate = self.counts.fronts * len(self._ends) / max(0.001, time.monotonic() - self._ends[0])
        return min(LONGEST_RETRY_SECONDS, max(1.0, 0.5 * waiting / rate))

    def _full(self, limit: Count, what: str, waiting: int) -> ApiError:
        self.counts.add(limit, 1)
        seconds = self.retry_after(waiting)
        return ApiError(
            429, f"the server is busy: {what}. Try again later", headers={"Retry-After": retry_text(seconds)}
        )
