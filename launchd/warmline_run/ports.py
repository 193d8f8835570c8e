"""Checks of ports and the home before a start: which processes listen, and which one holds the home."""

import errno
import json
import os
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from warmline_common.settings.resolve import ResolvedConfig
from warmline_common.settings.table import SETTINGS
from warmline_common.storage import disk
from warmline_common.storage.file_lock import find_lock_holder
from warmline_run.address import make_address

PORT_SETTINGS = ("port", "backend_port")
LOCKS = ("home.lock", "run/backend.lock")


@dataclass(frozen=True)
class ProxyAnnouncement:
    """Content of run/proxy.json, which a proxy writes about itself."""

    url: str
    pid: int


def find_running_proxy(home: Path) -> ProxyAnnouncement | None:
    """Announcement of the proxy that holds this home; None where none does.

    A killed proxy leaves its file behind: another process that has its pid or its port by now is not taken for it.
    """
    try:
        content = json.loads(disk.read_file(home / "run" / "proxy.json"))
        announcement = ProxyAnnouncement(str(content["url"]), int(content["pid"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return announcement if find_lock_holder(home / "home.lock") == str(announcement.pid) else None


def describe_occupied_port(config: ResolvedConfig, own_ports: Collection[int] = ()) -> str:
    """One line about the first port that can't be listened on, `own_ports` aside; "" where all are free."""
    hosts = {"port": make_address(config).host, "backend_port": "127.0.0.1"}
    for name in PORT_SETTINGS:
        number = int(config[name])
        if number not in own_ports and (reason := _probe_port(hosts[name], number)):
            pair = _describe_running_pair(Path(str(config["home"]))) if reason == os.strerror(errno.EADDRINUSE) else ""
            remedy = pair or f"; stop what listens there, or use another {SETTINGS[name].flag}"
            return f"can't listen on {hosts[name]} port {number} ({SETTINGS[name].flag}): {reason}{remedy}"
    return ""


def _probe_port(host: str, number: int) -> str:
    """Reason why the port can't be bound; "" where it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _describe_running_pair(home: Path) -> str:
    """Address of the pair that runs from the same home, as the end of a message; "" where none runs."""
    if proxy := find_running_proxy(home):
        process = f"process {proxy.pid} serves {home} at {proxy.url}"
        advice = "where `warmline serve` or an agent runs, stop it first, or use other ports and another home"
        return f" ({process}; {advice})"
    return ""


def describe_home_holder(home: Path, own_pids: Collection[int] = ()) -> str:
    """One line about the process that holds the home, `own_pids` aside; "" where none does."""
    for name in LOCKS:
        holder = find_lock_holder(home / name)
        if holder and not (holder.isdecimal() and int(holder) in own_pids):
            return (
                f"{home} is in use by process {holder} ({name}): `warmline serve`, an agent or cachectl; "
                "end that first, or use another --home"
            )
    return ""


def is_listening(home: Path, port: int) -> bool:
    """True where the proxy of this home, and no other process, listens on the port."""
    proxy = find_running_proxy(home)
    with suppress(ValueError):  # its address may make no sense
        return proxy is not None and urlsplit(proxy.url).port == port
    return False
