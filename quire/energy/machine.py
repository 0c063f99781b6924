"""What Linux says about a machine's battery and temperature. Never raises: what cannot be read is not known."""

from __future__ import annotations

from pathlib import Path

SUPPLIES = Path("/sys/class/power_supply")
THERMAL = Path("/sys/class/thermal")
ASSUMED_LIMIT = 95.0
"""Degrees Celsius at which a processor without a trip point is taken to be too hot."""
OF_PROCESSORS = ("x86_pkg_temp", "cpu", "soc", "k10temp", "coretemp", "acpitz")
"""Beginnings of the types of thermal zones that are about processors."""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def has_battery() -> bool:
    """Whether the machine itself has a battery (not a mouse or a headset)."""
    return any(_text(each / "type") == "Battery" and _text(each / "scope") != "Device" for each in SUPPLIES.glob("*"))


def on_battery() -> bool:
    """Whether the machine runs from its battery: it has one that discharges, and no other supply is connected."""
    is_discharging = False
    for each in SUPPLIES.glob("*"):
        kind = _text(each / "type")
        if kind == "Battery" and _text(each / "scope") != "Device":
            is_discharging |= _text(each / "status") == "Discharging"
        elif kind in ("Mains", "USB") and _text(each / "online") == "1":
            return False
    return is_discharging


class ProcessorTemperature:
    """The hottest thermal zone of the processor, as degrees below its limit."""

    def __init__(self) -> None:
        zones = [each for each in sorted(THERMAL.glob("thermal_zone*")) if _text(each / "temp")]
        named = [each for each in zones if _text(each / "type").lower().startswith(OF_PROCESSORS)]
        self._zones = [(each / "temp", _limit(each)) for each in named]

    def headroom(self) -> float | None:
        """Degrees that are left; None if they cannot be read."""
        left = []
        for file, limit in self._zones:
            if (degrees := _degrees(_text(file))) is not None:
                left.append(limit - degrees)
        return min(left, default=None)


def _limit(zone: Path) -> float:
    """The lowest temperature at which the system would slow the processor down or stop."""
    limits = [
        degrees
        for kind in zone.glob("trip_point_*_type")
        if _text(kind) in ("hot", "critical")
        and (degrees := _degrees(_text(zone / kind.name.replace("_type", "_temp")))) is not None
        and degrees > 40
    ]
    return min(limits, default=ASSUMED_LIMIT)


def _degrees(text: str) -> float | None:
    try:
        return int(text) / 1000
    except ValueError:
        return None
