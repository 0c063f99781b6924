"""Which addresses may be fetched from."""

from __future__ import annotations

import pytest

from quire.media.addresses import is_public


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.1",
        "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "168.63.129.16",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "::ffff:0:7f00:1",
        "2001:0:5ef5:79fd:0:0:80ff:fffe", "2606:4700::200:5efe:127.0.0.1", "2606:4700::5efe:10.0.0.1",
        "", "localhost", "1.2.3", "not an address",
    ],
)  # fmt: skip
def test_addresses_of_the_servers_own_network_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "8.8.8.8", "1.1.1.1", "172.32.0.1", "100.63.255.255", "2606:4700:4700::1111", "64:ff9b::808:808"],
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)
