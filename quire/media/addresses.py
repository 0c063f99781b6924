"""Which addresses may be fetched from: public ones only, so that no URL reaches the server's own network.

The lists are IANA's registries of special addresses. Python's `is_global` differs between its versions.
"""

from __future__ import annotations

import ipaddress

_SPECIAL = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
        "168.63.129.16/32",  # public by number, but answered by the platform that a virtual machine runs on
    )
)  # fmt: skip
_GLOBAL = ipaddress.IPv6Network("2000::/3")
_SPECIAL_GLOBAL = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
"""Tunnels, benchmarks and documentation."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
_LAST = 0xFFFFFFFF


def is_public(text: str) -> bool:
    """Whether an address, as a resolver returns it, is one that anybody on the internet may reach."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return _is_public_v4(address) if isinstance(address, ipaddress.IPv4Address) else _is_public_v6(address)


def _is_public_v4(address: ipaddress.IPv4Address) -> bool:
    return not any(address in network for network in _SPECIAL)


def _is_public_v6(address: ipaddress.IPv6Address) -> bool:
    if address.scope_id is not None:  # an address of one interface
        return False
    number = int(address)
    inner = ipaddress.IPv4Address(number & _LAST)
    if address in _NAT64:  # packets go on to the IPv4 address
        return _is_public_v4(inner)
    if (number >> 32) & _LAST in _ISATAP and not _is_public_v4(inner):
        return False
    return address in _GLOBAL and not any(address in network for network in _SPECIAL_GLOBAL)
