"""Each call's own outputs, whichever call makes the step that brings them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.api.engine import Failed, LLMEngine
from quire.messages.outputs import Output


class Inbox:
    """Sorts outputs by who waits for them, so that streams can be read in turns and beside other calls."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._boxes: dict[str, list[Output | Failed]] = {}

    @contextmanager
    def waiting(self, ids: list[str]) -> Iterator[Callable[[], list[Output]]]:
        """Gives a function that yields what came for these requests, making a step if nothing has; it raises if one
        of them has failed.

        Whatever ends the block, an exception included, leaves none of the requests behind.
        """
        box: list[Output | Failed] = []
        self._boxes.update(dict.fromkeys(ids, box))

        def take() -> list[Output]:
            if not box:
                self.step()
            taken, box[:] = list(box), []
            if (failed := next((one for one in taken if isinstance(one, Failed)), None)) is not None:
                raise failed.error
            return taken  # type: ignore[return-value]  # none of them has failed

        try:
            yield take
        finally:
            for request_id in ids:
                del self._boxes[request_id]
            self._engine.abort_request(ids)

    def step(self) -> None:
        """One step; what it brings is put where it is waited for."""
        for one in self._engine.arrivals():
            if (box := self._boxes.get(one.request_id)) is not None:
                box.append(one)
