"""What it takes to bring a block back, and what it takes to compute it again: both measured, all the time."""

from __future__ import annotations

import math

MEMORY = 0.2
"""Weight of the newest measurement."""
LEAST_TOKENS = 64
"""A step with fewer prompt tokens says little about what prompt tokens cost."""
LEAST_BYTES = 32 << 20
"""The same for copies."""


class MeasuredSpeed:
    """Things a second, remembered with the newest weighing most; unknown until something was measured."""

    def __init__(self, value: float = math.nan) -> None:
        self.value = value

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.value)

    def note(self, amount: float, seconds: float) -> None:
        """So much was done in so much time."""
        if seconds > 0 and amount > 0:
            rate = amount / seconds
            # Rates are averaged as times: a slow copy counts for what it cost.
            self.value = rate if not self.is_known else 1 / ((1 - MEMORY) / self.value + MEMORY / rate)

    def seconds(self, amount: float) -> float:
        """What so much would take; infinite where nobody knows."""
        return amount / self.value if self.is_known else math.inf


class Costs:
    """Speeds of the links between tiers and of prefill, and the choices that follow from them."""

    def __init__(self, block_bytes: int, out: float = math.nan, back: float = math.nan, disk: float = math.nan) -> None:
        """Bytes of a block, and bytes a second out to the host, back to the device, and from the disk."""
        self.block_bytes = block_bytes
        self.out, self.back, self.disk = MeasuredSpeed(out), MeasuredSpeed(back), MeasuredSpeed(disk)
        self.prefill = MeasuredSpeed()
        """Tokens a second."""

    def loading_pays(self, host_blocks: int, disk_blocks: int, tokens: int) -> bool:
        """Whether to bring blocks back rather than to compute their tokens."""
        seconds = self.back.seconds((host_blocks + disk_blocks) * self.block_bytes) if host_blocks + disk_blocks else 0
        if disk_blocks and self.disk.is_known:
            seconds += self.disk.seconds(disk_blocks * self.block_bytes)
        return not self.prefill.is_known or seconds < self.prefill.seconds(tokens)

    def swapping_pays(self, blocks_out: int, blocks_back: int, tokens: int) -> bool:
        """Whether to move a row's blocks out, and back later, rather than to compute its tokens again."""
        size = self.block_bytes
        if not self.prefill.is_known:
            return False  # a row that was never computed is no loss
        return self.out.seconds(blocks_out * size) + self.back.seconds(blocks_back * size) < self.prefill.seconds(
            tokens
        )
