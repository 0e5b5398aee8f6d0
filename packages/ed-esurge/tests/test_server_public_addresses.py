"""The server downloads from addresses of the public internet only."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import pytest
from ed_esurge.server.generation.images import ChatImages, resolve_host
from ed_esurge.server.generation.media import IMAGE
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.public_addresses import is_public

#: One address of each kind that no download may reach.
PRIVATE = {
    "this network": "0.1.2.3",
    "unspecified": "0.0.0.0",
    "loopback": "127.0.0.1",
    "loopback, end": "127.255.255.254",
    "private 10": "10.1.2.3",
    "private 172.16": "172.31.255.255",
    "private 192.168": "192.168.0.1",
    "carrier": "100.64.0.1",
    "carrier, metadata": "100.100.100.200",
    "link-local, metadata": "169.254.169.254",
    "host of a virtual machine": "168.63.129.16",
    "protocol assignments": "192.0.0.1",
    "protocol assignments, metadata": "192.0.0.192",
    "protocol assignments, NAT64 discovery": "192.0.0.170",
    "protocol assignments, anycast": "192.0.0.9",
    "documentation 1": "192.0.2.1",
    "documentation 2": "198.51.100.1",
    "documentation 3": "203.0.113.1",
    "relay of 6to4": "192.88.99.1",
    "AS112": "192.175.48.1",
    "benchmark": "198.19.0.1",
    "multicast": "224.0.0.1",
    "multicast, end": "239.255.255.250",
    "reserved": "240.0.0.1",
    "broadcast": "255.255.255.255",
    "IPv6 unspecified": "::",
    "IPv6 loopback": "::1",
    "IPv4-compatible": "::127.0.0.1",
    "IPv4-compatible, public": "::8.8.8.8",
    "IPv4-mapped": "::ffff:127.0.0.1",
    "IPv4-mapped in hexadecimal": "::ffff:a9fe:a9fe",
    "IPv4-translated": "::ffff:0:127.0.0.1",
    "NAT64": "64:ff9b::10.0.0.1",
    "NAT64 of a carrier": "64:ff9b::100.64.0.1",
    "NAT64 local": "64:ff9b:1::8.8.8.8",
    "discard": "100::1",
    "Teredo": "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "IPv6 benchmark": "2001:2::1",
    "ORCHID": "2001:10::1",
    "ORCHIDv2": "2001:20::1",
    "IPv6 documentation": "2001:db8::1",
    "IPv6 documentation 2": "3fff::1",
    "6to4": "2002:7f00:1::",
    "6to4 of a public address": "2002:808:808::",
    "6bone": "3ffe::1",
    "segment routing": "5f00::1",
    "unassigned": "4000::1",
    "unassigned, high": "e000::1",
    "unique local": "fc00::1",
    "unique local, metadata": "fd00:ec2::254",
    "IPv6 link-local": "fe80::1",
    "IPv6 link-local with scope": "fe80::1%eth0",
    "global with scope": "2606:4700::1111%1",
    "site-local": "fec0::1",
    "IPv6 multicast": "ff02::1",
    "IPv6 multicast, global": "ff0e::1",
    "ISATAP": "2606:4700::5efe:10.0.0.1",
    "ISATAP, universal bit": "2606:4700::200:5efe:10.0.0.1",
    "short": "127.1",
    "decimal": "2130706433",
    "hexadecimal": "0x7f000001",
    "octal": "0177.0.0.1",
    "leading zero": "010.8.8.8",
    "space": " 8.8.8.8",
    "name": "localhost",
    "empty": "",
    "brackets": "[::1]",
}
PUBLIC = (
    *("8.8.8.8", "1.1.1.1", "93.184.216.34", "100.63.255.255", "100.128.0.1", "172.32.0.1"),
    *("192.0.1.1", "198.17.255.255", "198.20.0.1", "223.255.255.254", "168.63.129.17"),
    *("2606:4700:4700::1111", "2001:4860:4860::8888", "2a00:1450::1", "2001:200::1"),
    *("::ffff:8.8.8.8", "64:ff9b::8.8.8.8"),
)


@pytest.mark.parametrize("kind", PRIVATE)
def test_addresses_of_private_kinds_are_not_public(kind):
    assert not is_public(PRIVATE[kind])


@pytest.mark.parametrize("number", PUBLIC)
def test_addresses_of_the_internet_are_public(number):
    assert is_public(number)


def test_no_address_that_the_standard_library_reserves_is_public():
    """The neighbours of every boundary of a special network of `ipaddress`."""
    constants = (ipaddress._IPv4Constants, ipaddress._IPv6Constants)  # type: ignore[attr-defined]
    for networks in constants:
        for network in networks._private_networks:
            for address in (network[0], network[-1]):
                if not address.is_global:
                    assert not is_public(str(address)), address


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0"])
def test_spellings_of_loopback_are_resolved_before_the_check(host):
    try:
        numbers = asyncio.run(resolve_host(host, 80))
    except socket.gaierror:
        return  # this system does not read the spelling
    assert numbers
    assert not any(map(is_public, numbers))
    reader = ChatImages(["pixel_values"], None, [host])
    with pytest.raises(APIError, match=r"not public|failed|must be"):
        asyncio.run(reader._read_url(f"http://{host}/a.png", IMAGE, "image"))


def test_one_private_address_of_a_name_refuses_the_download(monkeypatch):
    """A name with several addresses is refused, whatever their order is."""
    from ed_esurge.server.generation import images

    for numbers in (["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"], ["::1"]):

        async def answer(host, port, numbers=numbers):
            return numbers

        monkeypatch.setattr(images, "resolve_host", answer)
        reader = ChatImages(["pixel_values"], None, ["cdn.test"])
        with pytest.raises(APIError, match="an address that is not public"):
            asyncio.run(reader._read_url("http://cdn.test/a.png", IMAGE, "image"))
