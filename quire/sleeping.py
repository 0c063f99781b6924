"""Sleep that ends early."""

from __future__ import annotations

import select
from collections.abc import Iterable


def sleep_until(files: Iterable[int], seconds: float) -> list[int]:
    """Until one of the files has something to read, or time is up; which of them have."""
    poll = select.poll()  # `select` knows no file above 1023
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(max(0.0, seconds) * 1000)]
