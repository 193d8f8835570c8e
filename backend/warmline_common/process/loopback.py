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
    address = _parse_address(peer)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if address is None or not (mapped or address).is_loopback or len(hosts) != 1:
        return False
    name = parse_host(hosts[0])
    return name in extra_names or is_loopback_name(name)


def parse_host(host: str) -> str:
    """Name or address of a Host header in lower case, without port, brackets and last dot; "" where it is none."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower().removesuffix(".") if found else ""


def is_ip_address(name: str) -> bool:
    return _parse_address(name) is not None


def is_loopback(host: str) -> bool:
    """True where a socket bound to `host` accepts connections from this machine alone."""
    address = _parse_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def is_loopback_name(name: str) -> bool:
    """True for names and addresses that mean the client's own machine."""
    return name.endswith(".localhost") or is_loopback(name)


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
