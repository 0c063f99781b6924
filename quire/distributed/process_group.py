"""torch.distributed process groups: how ranks rendezvous, which backend they use, over which network interface."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from datetime import timedelta

import torch

from quire.distributed.collectives import use_group
from quire.distributed.groups import Ranks

TCP = "tcp://"
_SIOCGIFADDR = 0x8915
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def join(ranks: Ranks, rendezvous: str, backend: str, seconds: float) -> None:
    """Join the process group of all ranks; does nothing for a single rank.

    `rendezvous`: a file only the ranks may write, or tcp://HOST:PORT. `seconds`: the timeout of joining and of every
    collective.
    """
    if ranks.size == 1:
        return
    timeout = timedelta(seconds=seconds)
    store = _make_store(rendezvous, ranks.size, timeout)
    torch.distributed.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout)
    if ranks.pp_size > 1 and ranks.tp_size > 1:
        firsts = range(0, ranks.size, ranks.tp_size)  # every rank creates every group, in the same order
        stages = [torch.distributed.new_group(range(i, i + ranks.tp_size), timeout=timeout) for i in firsts]
        use_group(stages[ranks.pp_rank])


def _make_store(rendezvous: str, size: int, timeout: timedelta) -> torch.distributed.Store:
    if not rendezvous.startswith(TCP):
        return torch.distributed.FileStore(rendezvous, size)
    host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
    return torch.distributed.TCPStore(host, int(port), is_master=False, timeout=timeout)


def loopback_environment(environment: dict[str, str]) -> dict[str, str]:
    """For ranks that are all on this machine: collectives use the loopback, unless the environment names another
    interface."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {**dict.fromkeys(_INTERFACE_VARIABLES, loopback), **environment}


def use_interface_of(sock: socket.socket) -> None:
    """Let collectives use this connection's network interface, unless the environment names one. By default gloo uses
    the address of the machine's hostname, which is often the loopback and unreachable from other machines."""
    name = _interface_of(sock.getsockname()[0])
    for variable in _INTERFACE_VARIABLES if name is not None else ():
        os.environ.setdefault(variable, str(name))


def _interface_of(address: str) -> str | None:
    """The interface with this IPv4 address; None if it is unknown."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
