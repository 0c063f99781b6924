"""What loading a block costs, and what computing it again costs: both measured continuously."""

from __future__ import annotations

import math

NEWEST_WEIGHT = 0.2
"""Weight of the newest measurement in the average."""
LEAST_TOKENS = 64
"""Steps with fewer prompt tokens are not measured: other costs dominate."""
LEAST_BYTES = 32 << 20
"""Smaller copies are not measured: their latency dominates."""


class MeasuredSpeed:
    """A moving average of bytes or tokens a second; NaN until something was measured."""

    def __init__(self, value: float = math.nan) -> None:
        self.value = value

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.value)

    def note(self, amount: float, seconds: float) -> None:
        """Add a measurement."""
        if seconds > 0 and amount > 0:
            rate = amount / seconds
            # Times are averaged, not rates: a slow copy counts for what it cost.
            weight = NEWEST_WEIGHT
            self.value = rate if not self.is_known else 1 / ((1 - weight) / self.value + weight / rate)

    def seconds(self, amount: float) -> float:
        """How long `amount` would take; infinite while the speed is not known."""
        return amount / self.value if self.is_known else math.inf


class Costs:
    """Speeds of the links between tiers and of prefill, and the decisions that follow from them."""

    def __init__(self, block_bytes: int, out: float = math.nan, back: float = math.nan, disk: float = math.nan) -> None:
        """Bytes of a block, and bytes a second from device to host, from host to device, and from disk to host."""
        self.block_bytes = block_bytes
        self.out, self.back, self.disk = MeasuredSpeed(out), MeasuredSpeed(back), MeasuredSpeed(disk)
        self.prefill = MeasuredSpeed()
        """Tokens a second."""

    def loading_pays(self, host_blocks: int, disk_blocks: int, tokens: int) -> bool:
        """Whether loading these blocks is faster than computing their tokens."""
        seconds = self.back.seconds((host_blocks + disk_blocks) * self.block_bytes) if host_blocks + disk_blocks else 0
        if disk_blocks and self.disk.is_known:
            seconds += self.disk.seconds(disk_blocks * self.block_bytes)
        return not self.prefill.is_known or seconds < self.prefill.seconds(tokens)

    def swapping_pays(self, blocks_out: int, blocks_back: int, tokens: int) -> bool:
        """Whether swapping a row out, and in later, is faster than computing its tokens again."""
        if not self.prefill.is_known:
            return False  # no prompt was long enough to measure: recomputing is cheap
        swap = self.out.seconds(blocks_out * self.block_bytes) + self.back.seconds(blocks_back * self.block_bytes)
        return swap < self.prefill.seconds(tokens)
