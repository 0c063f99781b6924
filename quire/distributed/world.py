"""Where ranks find each other."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch

from quire.distributed.collectives import use_group
from quire.distributed.groups import Ranks

TCP = "tcp://"


def join(ranks: Ranks, rendezvous: str, backend: str, seconds: float) -> None:
    """Meet the other ranks: in a file, which nobody else may write, or at tcp://HOST:PORT. Alone there is nobody.

    `seconds`: so long a rank waits for the others, now and in every collective.
    """
    if ranks.size == 1:
        return
    patience = timedelta(seconds=seconds)
    store = _store(rendezvous, ranks.size, patience)
    torch.distributed.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=patience)
    if ranks.pp_size > 1 and ranks.tp_size > 1:
        firsts = range(0, ranks.size, ranks.tp_size)  # all ranks make all groups, in the same order
        stages = [torch.distributed.new_group(range(i, i + ranks.tp_size), timeout=patience) for i in firsts]
        use_group(stages[ranks.pp_rank])


def _store(rendezvous: str, size: int, timeout: timedelta) -> torch.distributed.Store:
    if not rendezvous.startswith(TCP):
        return torch.distributed.FileStore(rendezvous, size)
    host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
    return torch.distributed.TCPStore(host, int(port), is_master=False, timeout=timeout)


def one_machine(environment: dict[str, str]) -> dict[str, str]:
    """For ranks that are all on this machine: they talk over its loopback alone, unless told otherwise."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, **environment}
