"""Which network interface has an address."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915
_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address; None where that cannot be told."""
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


def use_interface_of(sock: socket.socket) -> None:
    """Collectives go the way this connection goes, unless told otherwise. By itself gloo goes where the machine's own
    name leads, which on many is the loopback: others cannot come there."""
    name = interface_of(sock.getsockname()[0])
    for variable in _NAMES if name is not None else ():
        os.environ.setdefault(variable, str(name))
