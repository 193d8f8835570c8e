"""Checks of ports and the home before a start: which processes listen, and which one holds the home."""

import errno
import fcntl
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
from warmline_run.address import make_address

PORT_SETTINGS = ("port", "backend_port")
LOCKS = ("home.lock", "run/backend.lock")


@dataclass(frozen=True)
class ProxyAnnouncement:
    """Content of run/proxy.json, which a proxy writes about itself."""

    url: str
    pid: int


def find_running_proxy(home: Path) -> ProxyAnnouncement | None:
    """By the proxy that has this home; None where none does.

    One that was killed leaves it behind: who else has its pid or its port by now must not be taken for it.
    """
    try:
        told = json.loads((home / "run" / "proxy.json").read_text())
        found = ProxyAnnouncement(str(told["url"]), int(told["pid"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if _read_lock_holder(home / "home.lock") == str(found.pid) else None


def describe_occupied_port(config: ResolvedConfig, own_ports: Collection[int] = ()) -> str:
    """One line about the first port that can't be listened on, `own_ports` aside; "" where all are free."""
    hosts = {"port": make_address(config).host, "backend_port": "127.0.0.1"}
    for name in PORT_SETTINGS:
        number = int(config[name])
        reason = "" if number in own_ports else _probe_port(hosts[name], number)
        if reason:
            who = _describe_running_pair(Path(str(config["home"]))) if reason == os.strerror(errno.EADDRINUSE) else ""
            return f"can't listen on {hosts[name]} port {number} ({SETTINGS[name].flag}): {reason}{who}"
    return ""


def _probe_port(host: str, number: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _describe_running_pair(home: Path) -> str:
    """A pair that runs from the same home says where it listens."""
    if found := find_running_proxy(home):
        what = f"process {found.pid} serves {home} at {found.url}"
        return f" ({what}; where `warmline serve` or an agent runs, stop it first, or use other ports and another home)"
    return ""


def describe_home_holder(home: Path, own_pids: Collection[int] = ()) -> str:
    """One line about who holds the home, processes of `own` aside; "" where nobody does."""
    for name in LOCKS:
        holder = _read_lock_holder(home / name)
        if holder and not (holder.isdecimal() and int(holder) in own_pids):
            return (
                f"{home} is in use by process {holder} ({name}): `warmline serve`, an agent or cachectl; "
                "end that first, or use another --home"
            )
    return ""


def is_listening(home: Path, port: int) -> bool:
    """True where the proxy of this home, and no other process, listens on the port."""
    found = find_running_proxy(home)
    with suppress(ValueError):  # its address may make no sense
        return bool(found and urlsplit(found.url).port == port)
    return False


def _read_lock_holder(lock: Path) -> str:
    """The pid, as text, of the process that has locked the file; "?" where it does not say, "" where none has."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # never held, or not ours to read: who starts there says so
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "?"
    except OSError:  # a disk that knows no locks: who starts there says so
        return ""
    finally:
        os.close(descriptor)
    return ""
