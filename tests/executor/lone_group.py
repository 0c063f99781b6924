"""A tensor-parallel group of a single rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import distributed

from quire.distributed.collectives import use_group


@contextlib.contextmanager
def group_of_one(backend: str) -> Iterator[None]:
    """Make this process a tensor-parallel group of one rank."""
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    use_group(distributed.group.WORLD)
    try:
        yield
    finally:
        use_group(None)
        distributed.destroy_process_group()
