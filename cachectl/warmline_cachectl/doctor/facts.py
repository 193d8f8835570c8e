"""Facts for `cachectl doctor`: the home, the index, the proxy, the machine.  Changes nothing."""

import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warmline_cachectl import client
from warmline_common.process.loopback import is_loopback
from warmline_common.settings.resolve import read_setting
from warmline_common.storage.file_lock import find_lock_holder, is_process_alive
from warmline_common.storage.home import Home
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.index.index import IndexReader, IndexStoreError
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.store.crash_probe import is_readable
from warmline_proxy.store.files import find_non_private
from warmline_proxy.store.rows import IndexFinding, RequestRecord, Totals

ASK_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 5.0
STATUS_NAMES = {"backend", "engine", "persistence", "totals", "disk_budget_bytes"}
OPENBLAS_PATTERNS = ("usr/lib/*/openblas*/libopenblas*.so*", "usr/lib/*/libopenblas*.so*", "usr/lib64/libopenblas*.so*")


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Commands' answers are "" where the machine has no such command."""

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
    """As far as they can be read from here: of a running proxy's flags only what its status tells is known."""

    host: str
    port: int
    backend_port: int
    reuse: str
    lan: bool
    allowed_hosts: str
    stabilize: str
    key_in_settings: bool
    disk_budget_bytes: int
    on_loopback: bool


@dataclass(frozen=True, kw_only=True)
class IndexFacts:
    """`problem`: why it can't be read; all else is then empty."""

    problem: str = ""
    findings: list[IndexFinding] = field(default_factory=list)
    totals: Totals | None = None
    records: list[RequestRecord] = field(default_factory=list)
    roots: dict[str, int] = field(default_factory=dict)  # model to how many namespaces have something of it


@dataclass(frozen=True, kw_only=True)
class Facts:
    home: Path
    has_home: bool
    open_modes: list[str] = field(default_factory=list)
    lock_holder: str = ""  # the pid that holds home.lock; "" where nobody does
    run_files: dict[str, int] = field(default_factory=dict)  # that name a process which is gone
    proxy_url: str = ""
    proxy_error: str = ""  # why it can't be asked
    status: dict[str, Any] | None = None  # GET /warmline/status
    ports_taken: list[int] = field(default_factory=list)  # by others, while no proxy of this home runs
    keys: int = 0  # that clients may show
    keys_problem: str = ""
    log_bytes: int = 0
    index: IndexFacts = field(default_factory=IndexFacts)
    settings: SettingsFacts
    machine: MachineFacts


def gather(home: Home) -> Facts:
    """Takes as long as a quick `verify`.  Raises OSError where not even the home's folder can be looked at, Refused."""
    machine = _read_machine(home)
    if not home.root.is_dir():
        return Facts(home=home.root, has_home=False, settings=_read_settings(home), machine=machine)
    status, error = _read_status(home)
    settings = _read_settings(home, status)
    keys, keys_problem = _count_keys(home)
    return Facts(
        home=home.root,
        has_home=True,
        open_modes=[_format_mode(home, path, mode) for path, mode in _find_open_modes(home)],
        lock_holder=find_lock_holder(home.lock),
        run_files=_find_stale_pid_files(home),
        proxy_url=client.proxy_url(home),
        proxy_error=error,
        status=status,
        ports_taken=[] if status else [port for port in (settings.port, settings.backend_port) if _is_taken(port)],
        keys=keys,
        keys_problem=keys_problem,
        log_bytes=_folder_bytes(home.logs),
        index=_read_index(home),
        settings=settings,
        machine=machine,
    )


def _read_settings(home: Home, status: Mapping[str, Any] | None = None) -> SettingsFacts:
    bound = str((status or {}).get("host", ""))  # what a running proxy listens on, `lan` included
    host = bound or read_setting(home.root, "host")
    lan = read_setting(home.root, "lan")
    return SettingsFacts(
        host=host,
        port=read_setting(home.root, "port"),
        backend_port=read_setting(home.root, "backend_port"),
        reuse=read_setting(home.root, "reuse"),
        lan=lan,
        allowed_hosts=read_setting(home.root, "allowed_hosts"),
        stabilize=read_setting(home.root, "stabilize"),
        key_in_settings=bool(read_setting(home.root, "client_key")),
        disk_budget_bytes=client.read_disk_budget_bytes(home),
        on_loopback=is_loopback(host) and (bool(bound) or not lan),
    )


def _find_open_modes(home: Home) -> list[tuple[Path, int]]:
    """Paths of the home that other users may read, with their modes."""
    mode = stat.S_IMODE(home.root.stat().st_mode)
    return [*([(home.root, mode)] if mode & 0o077 else []), *find_non_private(home)]


def _format_mode(home: Home, path: Path, mode: int) -> str:
    return f"{path.relative_to(home.root) if path != home.root else path} ({mode:o})"


def _find_stale_pid_files(home: Home) -> dict[str, int]:
    """The files in run/ whose process is gone."""
    stale: dict[str, int] = {}
    for process in ("proxy", "backend"):
        with suppress(OSError, ValueError):
            pid = int(home.pid_file(process).read_text())
            if not is_process_alive(pid):
                stale[home.pid_file(process).name] = pid
    return stale


def _read_status(home: Home) -> tuple[dict[str, Any] | None, str]:
    """Raises Refused where it is not what the judgement looks at."""
    try:
        found = client.request_proxy(home, "/warmline/status", dict[str, Any], ASK_TIMEOUT_S)
    except client.CachectlError as error:
        return None, str(error)
    if missing := STATUS_NAMES - found.keys():
        told = f"it does not tell {', '.join(sorted(missing))}"
        raise client.OperationRefusedError(f"the proxy answered otherwise than expected (another version?): {told}")
    return found, ""


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
        return len(keys_file.read_client_keys(home)), ""
    except keys_file.KeyStoreError as error:
        return 0, str(error)


def _read_index(home: Home) -> IndexFacts:
    try:
        with IndexReader(home) as reader:
            if not is_readable(home.index):
                return IndexFacts(problem="no process gets through it")
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


def _run_command(*command: str, run: Callable[..., Any] = subprocess.run) -> str:
    try:
        done = run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return str(done.stdout) if done.returncode == 0 else ""
