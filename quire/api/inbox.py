"""Each call's own outputs, whichever call makes the step that brings them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.api.call_lock import CallLock
from quire.api.engine import FailedRequest, LLMEngine
from quire.api.interrupts import deferred_interrupts
from quire.messages.outputs import Output

Box = list[Output | FailedRequest]
PATIENCE = 0.02
"""Seconds: a thread that waits for engines in other processes lets others have a turn so often."""


class Inbox:
    """Sorts outputs by who waits for them, so that streams can be read in turns and beside other calls, and calls can
    come from many threads: whichever makes a step makes it for all."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._boxes: dict[str, Box] = {}
        self.turns = CallLock()
        """Who may use the engine now."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other thread uses the engine meanwhile, and Ctrl-C waits."""
        with self.turns, deferred_interrupts():
            yield

    def expect(self, request_id: str, box: Box) -> None:
        """What comes for a request goes into this box. To be said in the turn that queued it."""
        self._boxes[request_id] = box

    def leave(self, ids: list[str]) -> None:
        """Nobody waits for these requests any more; what is unfinished of them ends."""
        with self.turns:
            for request_id in ids:
                self._boxes.pop(request_id, None)
            self._engine.abort_request(ids)

    @contextmanager
    def waiting(self, ids: list[str]) -> Iterator[Callable[[], list[Output]]]:
        """Gives a function that yields what came for these requests, which share a box, making a step if nothing has;
        it raises if one of them has failed.

        Whatever ends the block, an exception included, leaves none of the requests behind.
        """
        box = self._boxes[ids[0]] if ids else []

        def take() -> list[Output]:
            with self.turns:
                if not box:
                    self.step()
                taken, box[:] = list(box), []
            if (failed := next((one for one in taken if isinstance(one, FailedRequest)), None)) is not None:
                raise failed.error
            return taken  # type: ignore[return-value]  # none of them has failed

        try:
            yield take
        finally:
            self.leave(ids)

    def step(self) -> None:
        """One step; what it brings is put where it is waited for."""
        with self.turns:
            for one in self._engine.arrivals(PATIENCE):
                if (box := self._boxes.get(one.request_id)) is not None:
                    box.append(one)
