"""How full a tier is, as two watermarks see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Pressure:
    """Levels of pressure, and what was done about it."""

    low: float = 0.15
    """With less than this share free, room is made before it is needed…"""
    high: float = 0.03
    """…and with less than this, whatever is in the way goes."""
    slept: int = 0
    """Sessions put to sleep to make room."""

    def level(self, free: int, capacity: int) -> int:
        """0: none, 1: past the first watermark, 2: past the second."""
        return (free < self.low * capacity) + (free < self.high * capacity)
