"""When requests leave: seconds after the start, one for each."""

from __future__ import annotations

import math
import random

from quire.errors import ValidationError


def arrivals(count: int, rate: float, burstiness: float, burst: int, seed: int) -> list[float]:
    """`count` times at `rate` requests a second.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in clumps, more is
    steadier. With `burst` above 1 so many leave together, and the gaps between bursts keep the rate. An infinite rate
    is everything at once.
    """
    if not rate > 0:
        raise ValidationError(f"--request-rate must be above 0 (inf is everything at once), got {rate:g}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ValidationError(f"--burstiness must be above 0 (1 is a Poisson process), got {burstiness:g}")
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(seed)
    times: list[float] = []
    now = 0.0
    while len(times) < count:  # the first burst leaves at once: nothing is learnt by waiting for it
        times += [now] * min(burst, count - len(times))
        now += draw.gammavariate(burstiness, burst / (rate * burstiness))
    return times
