"""NVIDIA's management library: energy, temperature and, if it was allowed, power limits and clocks of cards."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from quire.energy.meters import MeterContext, MeterError

logger = logging.getLogger(__name__)

INSTALL = 'pip install "quire[energy]"'
SAVER_CLOCK_SHARE = 0.7
"""Share of a card's highest clock that is the highest while energy is saved."""


def load_library() -> Any:
    """The Python binding of NVML, initialized; raises `MeterError` if it cannot be used."""
    try:
        import pynvml
    except ImportError:
        raise MeterError(f"nvidia-ml-py is not installed: {INSTALL}") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MeterError(f"NVML does not start ({error})") from None
    return pynvml


def open_cards(library: Any, cards: tuple[str, ...]) -> list[Any]:
    """NVML's handles of these cards, by number or UUID."""
    try:
        by_number, by_uuid = library.nvmlDeviceGetHandleByIndex, library.nvmlDeviceGetHandleByUUID
        return [by_number(int(card)) if card.isdecimal() else by_uuid(card) for card in cards or ("0",)]
    except library.NVMLError as error:
        raise MeterError(f"NVML does not know the GPUs {', '.join(cards)} ({error})") from None


class NvmlMeter:
    """The cards' own counters. A card without one (before Volta) has its power integrated over time, an estimate."""

    def __init__(self, context: MeterContext, library: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._library = library or load_library()
        self._handles = open_cards(self._library, context.cards)
        self._clock = clock
        self._integrated, self._read_at = 0.0, clock()
        try:
            self._begin = self._counters()
            self.is_estimate, self.source = False, "nvml"
        except self._library.NVMLError:
            self.is_estimate, self.source = True, "nvml-power"
            self.read()  # raises if there is neither

    def read(self) -> float:
        try:
            return self._integrate() if self.is_estimate else self._counters() - self._begin
        except self._library.NVMLError as error:
            raise MeterError(f"NVML does not read the cards' energy ({error})") from None

    def _counters(self) -> float:
        return sum(self._library.nvmlDeviceGetTotalEnergyConsumption(each) for each in self._handles) / 1e3

    def _integrate(self) -> float:
        now = self._clock()
        watts = sum(self._library.nvmlDeviceGetPowerUsage(each) for each in self._handles) / 1e3
        self._integrated += watts * (now - self._read_at)
        self._read_at = now
        return self._integrated

    def close(self) -> None:
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlShutdown()


class NvmlTemperature:
    """The hottest card, as degrees below the temperature at which it slows itself down."""

    def __init__(self, cards: tuple[str, ...], library: Any = None) -> None:
        self._library = library or load_library()
        self._handles = open_cards(self._library, cards)

    def headroom(self) -> float | None:
        """Degrees that are left; None if they cannot be read."""
        lib = self._library
        try:
            return float(
                min(
                    lib.nvmlDeviceGetTemperatureThreshold(each, lib.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
                    - lib.nvmlDeviceGetTemperature(each, lib.NVML_TEMPERATURE_GPU)
                    for each in self._handles
                )
            )
        except lib.NVMLError:
            return None


class GpuControl:
    """Lowers the cards' power limits to a budget, and their clocks while energy is saved. Puts everything back.

    Only with `allow_gpu_power_control`, and only where the driver permits it (root).
    """

    def __init__(self, cards: tuple[str, ...], library: Any = None) -> None:
        self._library = library or load_library()
        self._handles = open_cards(self._library, cards)
        self._limits: list[tuple[Any, int]] = []
        """Cards whose limit was changed, and what it was, in milliwatts."""
        self._locked: list[Any] = []

    def limit(self, watts: float) -> float | None:
        """Share `watts` among the cards as their limits, within what each allows; returns what they are limited to in
        all, None if the driver refuses."""
        lib, total = self._library, 0
        try:
            for each in self._handles:
                least, most = lib.nvmlDeviceGetPowerManagementLimitConstraints(each)
                wanted = min(most, max(least, int(1000 * watts / len(self._handles))))
                before = lib.nvmlDeviceGetPowerManagementLimit(each)
                lib.nvmlDeviceSetPowerManagementLimit(each, wanted)
                self._limits.append((each, before))
                total += wanted
        except lib.NVMLError as error:
            logger.warning("the cards' power limits stay as they are (%s): steps are paced instead", error)
            self.restore()
            return None
        return total / 1000

    def slow(self, is_slow: bool) -> None:
        """Cap the clocks, or release them."""
        lib = self._library
        if not is_slow:
            self._release_clocks()
        elif not self._locked:
            try:
                for each in self._handles:
                    most = lib.nvmlDeviceGetMaxClockInfo(each, lib.NVML_CLOCK_GRAPHICS)
                    lib.nvmlDeviceSetGpuLockedClocks(each, 0, int(SAVER_CLOCK_SHARE * most))
                    self._locked.append(each)
            except lib.NVMLError as error:
                logger.warning("the cards' clocks stay as they are: %s", error)
                self._release_clocks()

    def _release_clocks(self) -> None:
        locked, self._locked = self._locked, []
        for each in locked:
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlDeviceResetGpuLockedClocks(each)

    def restore(self) -> None:
        """Put limits and clocks back."""
        limits, self._limits = self._limits, []
        for each, before in limits:
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlDeviceSetPowerManagementLimit(each, before)
        self._release_clocks()
