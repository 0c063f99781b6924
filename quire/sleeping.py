"""A sleep that ends early when a file becomes readable."""

from __future__ import annotations

import select
from collections.abc import Iterable


def sleep_until(files: Iterable[int], seconds: float) -> list[int]:
    """Wait until one of the files is readable, or for `seconds`; returns the readable ones."""
    poll = select.poll()  # `select` is limited to descriptors below 1024
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(max(0.0, seconds) * 1000)]
