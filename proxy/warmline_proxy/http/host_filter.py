"""Host names by which clients may reach this machine.  Pure, except `find_machine_names`.

A web page can point its own domain at this machine (DNS rebinding) and then has the proxy's origin in the browser. It
can't forge the Host header: each request must name a host that no foreign domain can be.
"""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from warmline_common.process.loopback import DOCKER_HOST, is_ip_address, parse_host
from warmline_proxy.errors import bad_request

ANY_HOST = "*"
LOCAL_NAMES = frozenset({"localhost", DOCKER_HOST})
LOOKUP_TIMEOUT_S = 2.0


class HostFilter:
    """Immutable set of names.  IP addresses are always allowed: only pages served there have such an origin."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = LOCAL_NAMES | frozenset(names)

    def check(self, hosts: Sequence[str], target: str, version: tuple[int, int]) -> None:
        """Check all Host headers and the request target.  Raises ClientError 400 or 403.

        A target in absolute form names a host, which some servers prefer; both must be allowed.
        """
        if len(hosts) > 1 or (not hosts and version >= (1, 1)):
            raise bad_request(f"A request has one Host header; this one has {len(hosts)}.")
        for host in [*hosts, *_target_hosts(target)]:
            if not (name := parse_host(host)):
                raise bad_request("The requested host is no host name.")
            if not (self._names & {ANY_HOST, name} or name.endswith(".localhost") or is_ip_address(name)):
                message = (
                    f"Host {name[:253]!r} is no name of this machine, and a stranger's web page might have pointed it "
                    "here.  If clients are to reach it by that name, add the name to the setting allowed_hosts."
                )
                raise bad_request(message, status=403, code="host_not_allowed")


def _target_hosts(target: str) -> list[str]:
    """Host in a target of absolute or authority form; none in usual targets."""
    if target.startswith("/") or target == "*":
        return []
    return [urlsplit(target).netloc if "://" in target else target]


def find_machine_names(*, with_domains: bool) -> frozenset[str]:
    """This machine's host name, the same in .local, and (may take 2 s) its names with domains.

    DHCP or DNS give those, and a hostile network may give a foreign name: for open proxies only, which require a key.
    """
    host = socket.gethostname().lower().removesuffix(".")
    short = host.partition(".")[0]
    names = {short, f"{short}.local", *_find_bonjour_names()}
    return frozenset(names | {host} | _find_domain_names() if with_domains else names) - {"", ".local"}


def _find_bonjour_names() -> set[str]:
    """Bonjour name of a Mac, whose host name may come from DHCP."""
    if sys.platform != "darwin":
        return set()
    try:
        command = ["/usr/sbin/scutil", "--get", "LocalHostName"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=LOOKUP_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return set()
    return {f"{result.stdout.strip().lower()}.local"}


def _find_domain_names() -> set[str]:
    """Fully qualified name, unless the resolver is slow."""
    found: set[str] = set()
    thread = threading.Thread(target=lambda: found.add(socket.getfqdn().lower().removesuffix(".")), daemon=True)
    thread.start()
    thread.join(LOOKUP_TIMEOUT_S)
    return {name for name in list(found) if not is_ip_address(name)}
