"""Meters: how many joules the devices of an engine have used. One small protocol, a registry, dotted paths too."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.errors import ConfigError, QuireError
from quire.registry import resolve

logger = logging.getLogger(__name__)

POWERCAP = Path("/sys/class/powercap")
PROC = Path("/proc")
WATTS_PER_CORE = 6.0
"""Model of the estimate: what a busy core draws, with its share of caches and memory."""
BUSY_CARD_WATTS = 350.0
IDLE_CARD_WATTS = 75.0
"""Model of the estimate for a GPU without NVML: a card while a step runs on it, and between steps."""


class MeterError(QuireError):
    """A meter cannot be read; the message says why and what to do."""


class Meter(Protocol):
    """Counts the energy of an engine's devices."""

    source: str
    """What is read: rapl, nvml, estimate, …"""
    is_estimate: bool
    """Whether joules come from a model instead of a measurement."""

    def read(self) -> float:
        """Joules since the meter was made; never falls. Raises `MeterError` if it cannot be read any more."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class MeterContext:
    """What is metered."""

    is_gpu: bool = False
    cards: tuple[str, ...] = ()
    """UUIDs or numbers of the GPUs, as NVML knows them."""
    has_children: bool = False
    """Whether ranks compute in child processes of this one."""
    busy_seconds: Callable[[], float] = lambda: 0.0
    """How long steps have run so far."""
    watts_per_core: float = WATTS_PER_CORE


METERS = {
    "estimate": "quire.energy.meters.Estimate",
    "nvml": "quire.energy.nvml.NvmlMeter",
    "rapl": "quire.energy.meters.Rapl",
}
"""By name. Each is called with a `MeterContext`, and raises `MeterError` if it cannot be read here."""


def make_meter(name: str, context: MeterContext) -> Meter:
    """The meter of that name, of several joined by +, or found at a dotted path.

    auto: NVML's counter for GPUs, RAPL for CPUs, and the estimate where that cannot be read. own: the same without
    RAPL, which counts what other engines on the machine use too.
    """
    if name not in ("auto", "own"):
        try:
            meters: list[Meter] = [resolve("energy meter", each, METERS)(context) for each in name.split("+")]
        except MeterError as error:
            raise ConfigError(f"energy_meter is {name!r}, but {error}", "energy_meter", name) from error
        return meters[0] if len(meters) == 1 else Sum(meters)
    measured = "nvml" if context.is_gpu else "rapl" if name == "auto" else "estimate"
    try:
        meter: Meter = resolve("energy meter", measured, METERS)(context)
    except MeterError as error:
        meter = Estimate(context)
        logger.warning("energy is estimated (%s): %s", meter.describe(), error)
    return meter


class Sum(Meter):
    """Several meters as one."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = meters
        self.source = "+".join(meter.source for meter in meters)

        self.is_estimate = any(meter.is_estimate for meter in meters)

    def read(self) -> float:
        return sum(meter.read() for meter in self._meters)

    def close(self) -> None:
        for meter in self._meters:
            meter.close()


class Rapl:
    """Counters of the processor's packages and memory, which Linux shows under /sys/class/powercap.

    They count everything that runs on the processor, other programs too.
    """

    source = "rapl"
    is_estimate = False

    def __init__(self, context: MeterContext | None = None) -> None:
        self._zones = [_Zone(folder) for folder in _zones()]
        if not self._zones:
            raise MeterError(f"this machine shows no energy counter under {POWERCAP} (virtual machines have none)")
        self._joules = 0.0

    def read(self) -> float:
        self._joules += sum(zone.used() for zone in self._zones)
        return self._joules

    def close(self) -> None: ...


def _zones() -> list[Path]:
    """Folders of packages, and of memory, which packages do not include. Cores are part of their package."""
    found = []
    for folder in sorted(POWERCAP.glob("*-rapl:*")):
        if folder.name.startswith("intel-rapl-mmio"):  # the same counters a second time
            continue
        try:
            name = (folder / "name").read_text().strip()
        except OSError:
            continue
        if name.startswith("package") or name == "dram":
            found.append(folder)
    return found


class _Zone:
    """One counter, which starts at zero again after its largest value."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._last = self._read()
        try:
            self._range = int((folder / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            self._range = 1 << 32

    def used(self) -> float:
        """Joules since the last call."""
        now = self._read()
        used = now - self._last
        self._last = now
        return (used if used >= 0 else used + self._range) / 1e6

    def _read(self) -> int:
        try:
            return int(self._file.read_text())
        except PermissionError:
            raise MeterError(
                f"{self._file} may be read by root only: chmod a+r it (a udev rule makes that last), or run as root"
            ) from None
        except (OSError, ValueError) as error:
            raise MeterError(f"{self._file} cannot be read ({error})") from None


class Estimate:
    """A model instead of a meter: watts of a busy core times CPU seconds, and watts of a card times time."""

    source = "estimate"
    is_estimate = True

    def __init__(
        self,
        context: MeterContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        context = context or MeterContext()
        self._cards = max(1, len(context.cards)) if context.is_gpu else 0
        self._watts = context.watts_per_core
        self._busy = context.busy_seconds
        self._cores = _TreeTime() if context.has_children else _OwnTime()
        self._clock = clock
        self._begin = clock()
        self._first_busy = self._busy()
        self._first = self._cores.seconds()

    def describe(self) -> str:
        """The model in a few words."""
        cores = f"{self._watts:g} W for each busy core"
        return f"{BUSY_CARD_WATTS:g} W for a busy GPU, {cores}" if self._cards else cores

    def read(self) -> float:
        joules = self._watts * (self._cores.seconds() - self._first)
        if self._cards:
            busy = self._busy() - self._first_busy
            idle = max(0.0, self._clock() - self._begin - busy)
            joules += self._cards * (BUSY_CARD_WATTS * busy + IDLE_CARD_WATTS * idle)
        return joules

    def close(self) -> None: ...


class _OwnTime:
    """CPU seconds of this process."""

    def seconds(self) -> float:
        return time.process_time()


class _TreeTime:
    """CPU seconds of this process and of all below it; those of processes that have ended stay."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}

    def seconds(self) -> float:
        pending = [os.getpid()]
        while pending:
            pid = pending.pop()
            try:
                fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
                threads = list((PROC / str(pid) / "task").iterdir())
            except OSError:
                continue
            used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            self._seen[pid] = max(self._seen.get(pid, 0.0), used)
            for thread in threads:
                try:
                    pending += map(int, (thread / "children").read_text().split())
                except OSError:
                    continue
        return sum(self._seen.values())
