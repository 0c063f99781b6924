"""Who gets in: a bound on what waits, in samples and in prompt tokens, and an estimate of when to come again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from quire.server.errors import ApiError, retry_text

REMEMBERED_ENDS = 64
LONGEST_RETRY = 60.0


class Bodies:
    """What clients have sent and is still held. Each body has a bound of its own; thousands of them need another."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        """Bytes of the bodies of all open requests."""

    def take(self, size: int) -> None:
        """Hold so many bytes more, or raise 429. What comes where nothing is held is taken whatever its size."""
        if self.held and self.held + size > self._most:
            raise ApiError(
                429,
                f"the server is busy: bodies of {self.held} bytes are open; at most {self._most} may be "
                "(--max-open-body-bytes). Try again later",
                headers={"Retry-After": retry_text(1.0), "Connection": "close"},
            )
        self.held += size

    def give_back(self, size: int) -> None:
        """Their request is over."""
        self.held -= size


class QueueTicket:
    """A request that was let in. `start` when its first output has come, `leave` when it is over; both may repeat."""

    def __init__(self, admission: AdmissionLimiter, samples: int, tokens: int) -> None:
        self._admission = admission
        self._samples = samples
        self._tokens = tokens

    def start(self) -> None:
        """It waits no more."""
        self._admission.queued_tokens -= self._tokens
        self._tokens = 0

    def leave(self) -> None:
        """It is over."""
        self.start()
        if self._samples:
            self._admission.samples -= self._samples
            self._samples = 0
            self._admission.requests -= 1
            self._admission.note_end()


class AdmissionLimiter:
    """Counts what is open. The engine runs `rows` samples at once; beyond them the queue begins."""

    def __init__(self, rows: int, max_requests: int, max_tokens: int) -> None:
        self._rows = rows
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.requests = 0
        """Let in, and not over."""
        self.samples = 0
        """Of all requests that were let in and are not over."""
        self.queued_tokens = 0
        """Of prompts that have yielded nothing yet."""
        self.rejected = {"requests": 0, "tokens": 0}
        """How often each bound was met."""
        self._ends: deque[float] = deque(maxlen=REMEMBERED_ENDS)

    def enter(self, samples: int, tokens: int) -> QueueTicket:
        """Let a request in, or raise 429. What comes to an empty server is let in whatever its size."""
        return self.enter_all([(samples, tokens)])[0]

    def enter_all(self, sizes: Sequence[tuple[int, int]]) -> list[QueueTicket]:
        """The same for requests that belong together, by samples and tokens: all of them come in, or none."""
        samples, tokens = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        waiting = max(0, self.samples - self._rows)
        if self.samples and self.samples + samples > self._rows + self._max_requests:
            raise self._full("requests", f"{waiting} requests are waiting; at most {self._max_requests} may", waiting)
        if self.queued_tokens and self.queued_tokens + tokens > self._max_tokens:
            what = f"{self.queued_tokens} prompt tokens are waiting; at most {self._max_tokens} may"
            raise self._full("tokens", what, waiting)
        self.requests += len(sizes)
        self.samples += samples
        self.queued_tokens += tokens
        return [QueueTicket(self, *size) for size in sizes]

    def note_end(self) -> None:
        """A request is over."""
        self._ends.append(time.monotonic())

    def retry_after(self, waiting: int) -> float:
        """Seconds until about half of the queue is gone, at the pace of the last ends."""
        if len(self._ends) < 2:
            return 1.0
        pace = len(self._ends) / max(0.001, time.monotonic() - self._ends[0])
        return min(LONGEST_RETRY, max(1.0, 0.5 * waiting / pace))

    def _full(self, bound: str, what: str, waiting: int) -> ApiError:
        self.rejected[bound] += 1
        seconds = self.retry_after(waiting)
        return ApiError(
            429, f"the server is busy: {what}. Try again later", headers={"Retry-After": retry_text(seconds)}
        )
