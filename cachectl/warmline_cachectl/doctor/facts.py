"""Facts for `cachectl doctor`: the home, the index, the proxy, the machine.  Changes nothing."""

import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warmline_cachectl import client
from warmline_common.process.loopback import is_loopback
from warmline_common.settings.resolve import read_setting
from warmline_common.storage.file_lock import find_lock_holder, is_process_alive, read_pid
from warmline_common.storage.home import Home
from warmline_proxy.auth import key_store
from warmline_proxy.index.index import IndexReader, IndexStoreError
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.store.files import find_non_private
from warmline_proxy.store.rows import IndexFinding, RequestRecord, Totals

ASK_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 5.0
PORTS = ("port", "backend_port")
STATUS_NAMES = {"backend", "engine", "persistence", "totals", "disk_budget_bytes"}
OWN_COMMAND = re.compile(r"\bwarmline(_proxy|_backend|_run)?\b")
OPENBLAS_PATTERNS = ("usr/lib/*/openblas*/libopenblas*.so*", "usr/lib/*/libopenblas*.so*", "usr/lib64/libopenblas*.so*")


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """State of the machine; commands' outputs are "" where the machine has no such command."""

    system: str  # as sys.platform
    memory_bytes: int
    disk_bytes_free: int
    disk_bytes: int
    descriptors_soft: int
    descriptors_hard: int
    now: float
    wired_limit_mb: str = ""  # macOS: sysctl iogpu.wired_limit_mb
    power: str = ""  # macOS: pmset -g
    agents: str = ""  # macOS: launchctl list
    has_gpu: bool = False  # Linux
    has_openblas: bool = False  # Linux


@dataclass(frozen=True, kw_only=True)
class SettingsFacts:
    """Settings of the home's files and this environment; of flags only what the home or a running proxy tells."""

    host: str
    port: int
    backend_port: int
    reuse: str
    lan: bool
    allowed_hosts: str
    key_in_settings: bool
    disk_budget_bytes: int
    on_loopback: bool


@dataclass(frozen=True, kw_only=True)
class IndexFacts:
    """Content of the index.  With a `problem` it can't be read, and all else is empty."""

    problem: str = ""
    findings: list[IndexFinding] = field(default_factory=list)
    totals: Totals | None = None
    records: list[RequestRecord] = field(default_factory=list)
    roots: dict[str, int] = field(default_factory=dict)  # number of namespaces by model


@dataclass(frozen=True, kw_only=True)
class Facts:
    home: Path
    has_home: bool
    open_modes: list[str] = field(default_factory=list)
    lock_holder: str = ""  # pid of the holder of home.lock; "" for none
    run_files: dict[str, int] = field(default_factory=dict)  # pid files of processes that are gone, by name
    foreign_run_files: dict[str, int] = field(default_factory=dict)  # pid files of processes that are other programs
    proxy_url: str = ""
    proxy_error: str = ""  # why it can't be asked
    status: dict[str, Any] | None = None  # GET /warmline/status
    ports_taken: list[int] = field(default_factory=list)  # by other programs, while no proxy of this home runs
    keys: int = 0  # of clients
    keys_problem: str = ""
    log_bytes: int = 0
    index: IndexFacts = field(default_factory=IndexFacts)
    settings: SettingsFacts
    machine: MachineFacts


def gather(home: Home) -> Facts:
    """Facts for all checks; takes as long as a quick `verify`.  Raises OSError, OperationRefusedError."""
    machine = _read_machine(home)
    if not home.root.is_dir():
        return Facts(home=home.root, has_home=False, settings=_read_settings(home), machine=machine)
    status, error = _read_status(home)
    settings = _read_settings(home, status)
    pids = _read_pid_files(home)
    keys, keys_problem = _count_keys(home)
    return Facts(
        home=home.root,
        has_home=True,
        open_modes=_find_open_modes(home),
        lock_holder=find_lock_holder(home.lock),
        run_files={name: pid for name, pid in pids.items() if not is_process_alive(pid)},
        foreign_run_files={name: pid for name, pid in pids.items() if is_process_alive(pid) and _is_foreign(pid)},
        proxy_url=client.proxy_url(home),
        proxy_error=error,
        status=status,
        ports_taken=[] if status else _find_taken_ports(home, settings),
        keys=keys,
        keys_problem=keys_problem,
        log_bytes=_folder_bytes(home.logs),
        index=_read_index(home),
        settings=settings,
        machine=machine,
    )


def _read_settings(home: Home, status: Mapping[str, Any] | None = None) -> SettingsFacts:
    names = ("host", *PORTS, "reuse", "lan", "allowed_hosts")
    values = {name: read_setting(home.root, name) for name in names}
    bound = str((status or {}).get("host", ""))  # address of a running proxy, `lan` included
    host = bound or values["host"]
    announced = {name: port for name, port in zip(PORTS, client.read_announced_ports(home), strict=True) if port}
    return SettingsFacts(
        **values | announced | {"host": host},
        key_in_settings=bool(read_setting(home.root, "client_key")),
        disk_budget_bytes=client.read_disk_budget_bytes(home),
        on_loopback=is_loopback(host) and (bool(bound) or not values["lan"]),
    )


def _find_open_modes(home: Home) -> list[str]:
    """Paths of the home that other users may read, with their modes."""
    mode = stat.S_IMODE(home.root.stat().st_mode)
    below = [f"{path.relative_to(home.root)} ({mode:o})" for path, mode in find_non_private(home)]
    return [f"{home.root} ({mode:o})", *below] if mode & 0o077 else below


def _read_pid_files(home: Home) -> dict[str, int]:
    """Pid by name of each process's file: of the proxy, of the backend or the keeper, and of each model's backend."""
    files = [home.pid_file("proxy"), *(each.pid_file("backend") for each in client.list_backends(home))]
    return {file.name: pid for file in files if (pid := read_pid(file)) is not None}


def _is_foreign(pid: int) -> bool:
    """True where the process is known, and none of ours: its number was another's before."""
    command = _run_command("ps", "-ww", "-o", "command=", "-p", str(pid)).strip()
    return bool(command) and not OWN_COMMAND.search(command)


def _read_status(home: Home) -> tuple[dict[str, Any] | None, str]:
    """(the proxy's status, "") or (None, error).  Raises OperationRefusedError for a status that lacks STATUS_NAMES."""
    try:
        status = client.request_proxy(home, "/warmline/status", dict[str, Any], ASK_TIMEOUT_S)
    except client.CachectlError as error:
        return None, str(error)
    if missing := STATUS_NAMES - status.keys():
        why = f"it does not tell {', '.join(sorted(missing))}"
        raise client.OperationRefusedError(f"the proxy answered otherwise than expected (another version?): {why}")
    return status, ""


def _find_taken_ports(home: Home, settings: SettingsFacts) -> list[int]:
    """Ports that other programs have.  The home's own backend may outlive its proxy for a while."""
    has_backend = find_lock_holder(home.backend_lock)
    ports = (settings.port,) if has_backend else (settings.port, settings.backend_port)
    return [port for port in ports if _is_taken(port)]


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # logs are rotated meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def _count_keys(home: Home) -> tuple[int, str]:
    try:
        return len(key_store.read_client_keys(home)), ""
    except key_store.KeyStoreError as error:
        return 0, str(error)


def _read_index(home: Home) -> IndexFacts:
    try:
        with IndexReader(home) as reader:
            reader.require_sound_pages()
            roots: dict[str, set[bytes]] = {}
            for row in reader.segments():
                roots.setdefault(row.model, set()).add(row.root)
            return IndexFacts(
                findings=verify_index(reader),
                totals=reader.totals(),
                records=reader.requests(),
                roots={model: len(found) for model, found in roots.items()},
            )
    except (IndexStoreError, OSError) as error:
        return IndexFacts(problem=str(error))


def _read_machine(home: Home) -> MachineFacts:
    place = next(path for path in (home.root, *home.root.parents) if path.exists())
    disk = shutil.disk_usage(place)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mac = sys.platform == "darwin"
    return MachineFacts(
        system=sys.platform,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk_bytes_free=disk.free,
        disk_bytes=disk.total,
        descriptors_soft=soft,
        descriptors_hard=hard,
        now=time.time(),
        wired_limit_mb=_run_command("sysctl", "-n", "iogpu.wired_limit_mb") if mac else "",
        power=_run_command("pmset", "-g") if mac else "",
        agents=_run_command("launchctl", "list") if mac else "",
        has_gpu=Path("/dev/nvidiactl").exists(),
        has_openblas=any(True for pattern in OPENBLAS_PATTERNS for _ in Path("/").glob(pattern)),
    )


def _run_command(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
