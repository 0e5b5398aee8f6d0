"""The IP addresses of the public internet: the check of every download.

`ed_data.public_addresses` and `ed_esurge.server.http.public_addresses` are the same file, because
neither package imports the other. `tools.check_workspace` compares them.
"""

from __future__ import annotations

import ipaddress

# https://www.iana.org/assignments/iana-ipv4-special-registry
_RESERVED_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # carriers, and the metadata of a cloud (100.100.100.200)
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # the host of a virtual machine on Azure
            "169.254.0.0/16",  # link-local, and the metadata of most clouds
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # automatic multicast tunnels
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and the broadcast address
        ),
    )
)
# IPv6 addresses that represent the IPv4 address in their last 32 bits.
_EMBEDDING = (
    ipaddress.IPv6Network("::ffff:0:0/96"),  # mapped
    ipaddress.IPv6Network("64:ff9b::/96"),  # translated by NAT64 (RFC 6052)
)
# The only assigned unicast addresses of IPv6, and the reserved parts of them.
# https://www.iana.org/assignments/iana-ipv6-special-registry
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_RESERVED_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4, a tunnel to any IPv4 address
            "2620:4f:8000::/48",  # AS112
            "3ffe::/16",  # 6bone, returned
            "3fff::/20",  # documentation
        ),
    )
)
# Interface identifiers of ISATAP, a tunnel to the IPv4 address in the last 32 bits (RFC 5214).
_ISATAP = (0x00005EFE, 0x02005EFE)


def is_public(number: str) -> bool:
    """Return whether an IP address belongs to the public internet.

    Addresses with a scope (`fe80::1%eth0`), and texts that are no canonical address (`0x7f.1`,
    `127.1`, `2130706433`), do not.
    """
    try:
        address = ipaddress.ip_address(number)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _RESERVED_V4)
    if address.scope_id is not None:
        return False
    last = ipaddress.IPv4Address(int(address) % 2**32)
    if any(address in network for network in _EMBEDDING):
        return is_public(str(last))
    if address not in _UNICAST_V6 or any(address in network for network in _RESERVED_V6):
        return False
    return int(address) >> 32 & 0xFFFFFFFF not in _ISATAP or is_public(str(last))
