"""A step that does not end is noticed, whatever the loop is stuck in."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from quire.messages.plan import StepPlan

CHECK_SECONDS = 1.0


class Watchdog:
    """Tells of a step that takes longer than `seconds` (0: never).

    It looks from a thread of its own, once a second: the loop may be stuck inside the driver, where no Python runs. To
    the loop it costs two assignments a step.
    """

    def __init__(self, seconds: float, on_hang: Callable[[StepPlan], None]) -> None:
        self.seconds = seconds
        self._on_hang = on_hang
        self._watched: tuple[StepPlan, float] | None = None
        self._told: tuple[StepPlan, float] | None = None
        self._stop = threading.Event()
        if seconds > 0:
            # The thread holds no reference that would keep an engine alive which everyone else has let go of.
            arguments = (weakref.ref(self), self._stop, min(CHECK_SECONDS, seconds / 4))
            threading.Thread(target=_watch, args=arguments, name="quire-watchdog", daemon=True).start()

    def begin(self, plan: StepPlan) -> None:
        """The loop is about to launch this step, or to wait for it."""
        self._watched = (plan, time.monotonic())

    def end(self) -> None:
        """It has come back."""
        self._watched = None

    def stop(self) -> None:
        """Nothing is watched any more."""
        self._stop.set()

    def look(self) -> None:
        """Tell, once, if what is watched has taken too long."""
        watched = self._watched
        if watched is None or watched is self._told or time.monotonic() - watched[1] < self.seconds:
            return
        self._told = watched
        self._on_hang(watched[0])


def _watch(watchdog: weakref.ref[Watchdog], stop: threading.Event, interval: float) -> None:
    while not stop.wait(interval):
        watching = watchdog()
        if watching is None:
            return
        watching.look()
        del watching
