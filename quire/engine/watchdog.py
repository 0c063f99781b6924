"""Detects a step that hangs, wherever the loop is stuck."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from quire.messages.plan import StepPlan

CHECK_SECONDS = 1.0


class Watchdog:
    """Calls `on_hang` for a step that takes longer than `seconds` (0: never).

    It checks once a second from a thread of its own: the loop may be stuck inside the driver, where no Python runs. It
    costs the loop two assignments a step.
    """

    def __init__(self, seconds: float, on_hang: Callable[[StepPlan], None]) -> None:
        self.seconds = seconds
        self._on_hang = on_hang
        self._watched: tuple[StepPlan, float] | None = None
        self._reported: tuple[StepPlan, float] | None = None
        self._stop = threading.Event()
        if seconds > 0:
            # A weak reference: the thread must not keep an engine alive that is not used any more.
            arguments = (weakref.ref(self), self._stop, min(CHECK_SECONDS, seconds / 4))
            threading.Thread(target=_watch, args=arguments, name="quire-watchdog", daemon=True).start()

    def begin(self, plan: StepPlan) -> None:
        """The loop is about to launch this step, or to wait for it."""
        self._watched = (plan, time.monotonic())

    def end(self) -> None:
        """The step was launched, or collected."""
        self._watched = None

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def check(self) -> None:
        """Report a step that has taken too long, once."""
        watched = self._watched
        if watched is None or watched is self._reported or time.monotonic() - watched[1] < self.seconds:
            return
        self._reported = watched
        self._on_hang(watched[0])


def _watch(watchdog: weakref.ref[Watchdog], stop: threading.Event, interval: float) -> None:
    while not stop.wait(interval):
        watching = watchdog()
        if watching is None:
            return
        watching.check()
        del watching
