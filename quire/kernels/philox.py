"""Random numbers as a function of (seed, counter, stream): the same whatever the batch, the row or the rank."""

from __future__ import annotations

from typing import Any

MASK = 0xFFFFFFFF
# Multipliers and key increments of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85


def philox(seed: Any, counter: Any, stream: Any, rounds: int = 10) -> Any:
    """32 random bits for each (seed, counter, stream).

    Works on int64 arrays of numpy and torch. Products wrap at 64 bits; shifting right and masking recovers the
    high half as unsigned.
    """
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    c0, c1, c2, c3 = counter & MASK, (counter >> 32) & MASK, stream & MASK, (stream >> 32) & MASK
    for _ in range(rounds):
        p0, p1 = c0 * M0, c2 * M1
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return c0


def uniform(seed: Any, counter: Any, stream: Any) -> Any:
    """Numbers in [0, 1) with 32 random bits, as doubles."""
    return philox(seed, counter, stream) * (1.0 / 2**32)
