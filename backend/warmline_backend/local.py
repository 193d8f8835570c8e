"""Whether a request comes from this machine, by itself and not by a page's trick (pure)."""

import ipaddress

NAMES = frozenset({"localhost", "host.docker.internal"})


def is_local(peer: str | None, host: str) -> bool:
    """`peer`: the other end's address; `host`: the Host header.

    A page in a browser here can point its own domain at 127.0.0.1 (DNS rebinding), but Host then says that domain.
    """
    return _is_loopback(peer or "") and _is_local_name(host)


def _is_local_name(host: str) -> bool:
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    return name in NAMES or name.endswith(".localhost") or _is_loopback(name)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
