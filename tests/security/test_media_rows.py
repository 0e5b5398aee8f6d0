"""The media of rows and of requests: both readers agree on the addresses of the internet."""

from __future__ import annotations

import ipaddress
import random

import pytest
from ed_data import public_addresses
from ed_esurge.server.http import public_addresses as server_addresses
from packaging.version import Version

from tools.workspace import ROOT, read_toml

KINDS = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::10.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::8.8.8.8",
    "64:ff9b:1::10.0.0.1",
    "100::1",
    "2001::1",
    "2001:2::1",
    "2001:10::1",
    "2001:20::1",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:808:808::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00::1",
    "fe80::1",
    "fec0::1",
    "ff02::1",
    "4000::1",
    "8.8.8.8",
    "1.1.1.1",
    "2606:4700:4700::1111",
    "2a00:1450::1",
]


def test_rows_and_requests_agree_on_public_addresses() -> None:
    generator = random.Random(0)
    numbers = [str(ipaddress.IPv4Address(generator.getrandbits(32))) for _ in range(2000)]
    numbers += [str(ipaddress.IPv6Address(generator.getrandbits(128))) for _ in range(2000)]
    numbers += [
        str(ipaddress.IPv6Address(generator.getrandbits(125) + 2**125)) for _ in range(2000)
    ]
    numbers += [
        str(network[place])
        for networks in (server_addresses._RESERVED_V4, server_addresses._RESERVED_V6)
        for network in networks
        for place in (0, -1)
    ]
    different = [
        number
        for number in [*KINDS, *numbers]
        if public_addresses.is_public(number) != server_addresses.is_public(number)
    ]
    assert not different


@pytest.mark.parametrize("package", ["ed-data", "ed-infra", "ed-trainers"])
def test_minimum_version_of_fsspec_runs_no_code_of_references(package: str) -> None:
    """Versions before 2026.6 render the templates of `reference::` outside of a sandbox."""
    project = read_toml(ROOT / f"packages/{package}/pyproject.toml")["project"]
    floors = dict(one.split(">=") for one in project["dependencies"] if "," not in one)
    assert Version(floors["fsspec"]) >= Version("2026.6")
