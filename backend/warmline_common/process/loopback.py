"""Predicates on addresses and host names: loopback, this machine.  Pure.

A page in a browser can point its own domain at 127.0.0.1 (DNS rebinding), but its Host header then names that domain.
"""

import ipaddress
import re
from collections.abc import Collection, Sequence

DOCKER_HOST = "host.docker.internal"  # what a container calls the machine that it runs on
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.~-]+)?)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?", flags=re.ASCII)


def is_local(peer: str, hosts: Sequence[str], extra_names: Collection[str] = ()) -> bool:
    """True for a request from this machine to a name of this machine.

    `peer`: address of the other end; `hosts`: all Host headers; `extra_names`: further names of this machine.
    """
    if not _is_loopback_peer(peer) or len(hosts) != 1:
        return False
    name = parse_host(hosts[0])
    return name in extra_names or is_loopback_name(name)


def parse_host(host: str) -> str:
    """Name or address of a Host header in lower case, without port, brackets and last dot; "" where it is none."""
    found = _HOST.fullmatch(host)
    if found is None:
        return ""
    return (found[1] or found[2]).lower().removesuffix(".")


def is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """True where a socket bound to `host` accepts connections from this machine alone."""
    return host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def is_loopback_name(name: str) -> bool:
    """True for names and addresses that mean the client's own machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return is_ip_address(name) and ipaddress.ip_address(name).is_loopback


def _is_loopback_peer(peer: str) -> bool:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
