"""A rank that sums over itself, as it would over many."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import distributed

from quire.distributed.collectives import use_group


@contextlib.contextmanager
def group_of_one(backend: str) -> Iterator[None]:
    """This process is all there is of a tensor-parallel group."""
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    use_group(distributed.group.WORLD)
    try:
        yield
    finally:
        use_group(None)
        distributed.destroy_process_group()
