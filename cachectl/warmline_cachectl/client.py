"""Access to a home: its index is read directly, and changed through the proxy, or under the home's lock where none
runs.

    CachectlError                  the message is for people
    ├── HomeNotFoundError          no such home, or nothing was ever stored in it
    ├── ProxyNotRunningError       no proxy runs on this home
    └── OperationRefusedError      another process holds the home, or the operation failed
        └── ProxyRefusedError      the proxy refused, in its own words
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from warmline_common.process.arguments import GB
from warmline_common.protocol.messages import ErrorReply, decode, encode, parse_error_message
from warmline_common.settings.resolve import read_setting
from warmline_common.storage import disk
from warmline_common.storage.file_lock import find_lock_holder
from warmline_common.storage.home import Home
from warmline_proxy.auth.key_store import KeyNotFoundError, KeyStoreError
from warmline_proxy.auth.owners import KeyTenants, OwnerLabels, build_owner_labels, find_fingerprints, load_key_tenants
from warmline_proxy.home_lock import HomeLockedError, home_lock
from warmline_proxy.index.index import Index, IndexReader, IndexStoreError
from warmline_proxy.index.recovery.orphans import delete_leftovers
from warmline_proxy.index.recovery.repair import repair as repair_index
from warmline_proxy.index.recovery.startup import repair_damage
from warmline_proxy.index.responses import ResponseLimits
from warmline_proxy.prewarm.reports import PrewarmReply, PrewarmReport, PrewarmRequest
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.pin import PinLimitError, UnknownSessionError, pin_session
from warmline_proxy.retention.purge import purge as purge_index
from warmline_proxy.retention.purge import resolve_key
from warmline_proxy.store import rows
from warmline_proxy.store.errors import REBUILD_HINT, IndexMissingError
from warmline_proxy.store.files import list_stored

BACKEND_TIMEOUT_S = 30.0
CHANGE_TIMEOUT_S = 600.0  # the proxy answers when the files are gone and the index is compacted
REPAIR_TIMEOUT_S = 24 * 3600.0  # every byte that is stored is read
REPLAY_TIMEOUT_S = 24 * 3600.0  # it waits for others, and computes long prompts from their first token
PREWARM_TIMEOUT_S = 300.0  # it renders a prompt, and computes nothing
OWNERS_TIMEOUT_S = 2.0  # a proxy that hangs delays no output for longer
LOCK_WAIT_S = 0.5  # a process that only checks whether the lock is held holds it for a moment

T = TypeVar("T")


class CachectlError(Exception):
    pass


class HomeNotFoundError(CachectlError):
    pass


class ProxyNotRunningError(CachectlError):
    pass


class OperationRefusedError(CachectlError):
    pass


class ProxyRefusedError(OperationRefusedError):
    """The message is the same as without a proxy; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Announcement(msgspec.Struct):
    """Content of run/proxy.json and of a backend's run/backend*.json."""

    pid: int = 0
    url: Annotated[str, msgspec.Meta(pattern="^http://")] = ""  # the proxy's
    port: int = 0  # the backend's


class _Health(msgspec.Struct):
    """GET /health of a backend, or of the keeper of several."""

    keeper: bool = False


# ---- reading


def check_home(home: Home) -> None:
    """Raises HomeNotFoundError."""
    if not home.root.is_dir():
        raise HomeNotFoundError(f"no home at {home.root} (name one with --home or WARMLINE_HOME)")


def open_reader(home: Home) -> IndexReader:
    """Reader of an index whose pages are sound: others would end this process.  Whether a proxy runs or not.

    Raises HomeNotFoundError, OperationRefusedError.
    """
    check_home(home)
    try:
        with ExitStack() as stack:
            reader = stack.enter_context(IndexReader(home))
            reader.require_sound_pages()
            stack.pop_all()
        return reader
    except IndexMissingError as error:
        if any(file_id for file_id, _ in list_stored(home)):
            raise OperationRefusedError(f"{error}, though files are stored; {REBUILD_HINT}") from error
        raise HomeNotFoundError(f"{error} (nothing was ever stored there)") from error
    except IndexStoreError as error:
        raise OperationRefusedError(str(error)) from error


def read_disk_budget_bytes(home: Home) -> int:
    return int(read_setting(home.root, "disk_budget_gb") * GB)


def read_response_limits(home: Home) -> ResponseLimits:
    days, megabytes = (read_setting(home.root, f"responses_keep_{unit}") for unit in ("days", "mb"))
    return ResponseLimits.from_settings(days, megabytes, read_disk_budget_bytes(home))


def read_key_tenants(home: Home) -> KeyTenants:
    """Tenants of the client keys in the home and of the settings' key.  Raises KeyStoreError."""
    return load_key_tenants(
        home, client_key=read_setting(home.root, "client_key"), share_cache=read_setting(home.root, "share_cache")
    )


def read_owner_labels(home: Home, snapshot: rows.IndexSnapshot) -> OwnerLabels:
    """Labels of owners: from the running proxy, which may have settings that no other process knows; else from the
    home's files, a header for each root.

    Raises OperationRefusedError where the keys can't be read.
    """
    with suppress(CachectlError):
        return request_proxy(home, "/warmline/whose", OwnerLabels, OWNERS_TIMEOUT_S)
    return _read_owner_labels_locally(home, snapshot.segments.values())


def read_owner_labels_if_readable(home: Home, snapshot: rows.IndexSnapshot) -> OwnerLabels:
    """Labels as `read_owner_labels` returns them; none where the keys can't be read."""
    try:
        return read_owner_labels(home, snapshot)
    except OperationRefusedError:
        return OwnerLabels()


def _read_owner_labels_locally(
    home: Home, segments: Iterable[rows.SegmentRow], response_fingerprints: Mapping[bytes, str] | None = None
) -> OwnerLabels:
    fingerprints = {**(response_fingerprints or {}), **find_fingerprints(home, segments)}
    try:
        return build_owner_labels(read_key_tenants(home), fingerprints)
    except KeyStoreError as error:
        raise OperationRefusedError(str(error)) from error


# ---- changes; each raises CachectlError


def purge(home: Home, request: rows.PurgeRequest) -> rows.PurgeReply:
    def purge_locally(index: Index) -> rows.PurgeReply:
        labels = OwnerLabels()
        if request.key:
            labels = _read_owner_labels_locally(home, index.segments(), index.response_fingerprints())
        try:
            reply = purge_index(index, resolve_key(request, labels))
        except KeyNotFoundError as error:
            raise OperationRefusedError(str(error)) from error
        if request.dry_run:
            return reply
        disk.delete(home.prompt_heads)
        problem = _clear_backend_caches(home)
        delete_leftovers(index)
        if problem:
            raise OperationRefusedError(f"it is gone from the disk, but {problem}")
        index.clear_purge_notice()
        return reply

    return change_index(home, "/warmline/purge", request, rows.PurgeReply, purge_locally)


def pin(home: Home, request: rows.PinRequest) -> rows.PinReply:
    return change_index(home, "/warmline/pin", request, rows.PinReply, lambda index: pin_session(index, request))


def gc(home: Home, request: rows.GcRequest) -> rows.GcReply:
    return change_index(
        home, "/warmline/gc", request, rows.GcReply, lambda index: collect_garbage(index, request, is_saving=False)
    )


def repair(home: Home) -> rows.RepairReply:
    check_home(home)
    if not (home.index.is_dir() or home.segments.is_dir()):
        raise HomeNotFoundError(f"no index in {home.index} (nothing was ever stored there)")

    def repair_locally(index: Index) -> rows.RepairReply:
        return repair_index(index, deep=True, is_saving=False)

    with suppress(ProxyNotRunningError):
        return request_proxy(home, "/warmline/repair", rows.RepairReply, REPAIR_TIMEOUT_S, {})
    return run_locked(home, repair_locally, must_be_sound=False)


def replay(home: Home, request: rows.ReplayRequest) -> rows.ReplayReply:
    """Replay by the proxy alone: a replay takes a model."""
    try:
        return request_proxy(home, "/warmline/replay", rows.ReplayReply, REPLAY_TIMEOUT_S, request)
    except ProxyNotRunningError as error:
        raise OperationRefusedError(
            "a replay computes: it needs the pair, which does not run on this home (start `warmline serve`)"
        ) from error


def list_prewarmed(home: Home) -> PrewarmReply:
    """States of the prompts that the running proxy computes ahead."""
    return _ask_prewarmer(home, None)


def prewarm(home: Home, request: PrewarmRequest) -> PrewarmReport:
    """Have the running proxy compute a prompt ahead; returns at once."""
    return _ask_prewarmer(home, request).entries[0]


def _ask_prewarmer(home: Home, request: PrewarmRequest | None) -> PrewarmReply:
    try:
        return request_proxy(home, "/warmline/prewarm", PrewarmReply, PREWARM_TIMEOUT_S, request)
    except ProxyNotRunningError as error:
        raise OperationRefusedError(
            "prewarming computes: it needs the pair, which does not run on this home (start `warmline serve`)"
        ) from error


def change_index(
    home: Home,
    path: str,
    request: object,
    reply_type: type[T],
    change_locally: Callable[[Index], T],
) -> T:
    """Reply of the proxy where one runs, else of `change_locally` under the home's lock."""
    with suppress(ProxyNotRunningError):
        return request_proxy(home, path, reply_type, CHANGE_TIMEOUT_S, request)
    return run_locked(home, change_locally)


def run_locked(home: Home, work: Callable[[Index], T], *, must_be_sound: bool = True) -> T:
    """Result of a function that runs under the home's lock.  Raises OperationRefusedError.

    A damaged index is repaired first if it `must_be_sound`: all that is stored would look like orphans, or nothing.
    """
    try:
        budget_bytes, limits = read_disk_budget_bytes(home), read_response_limits(home)
        keeps_texts = read_setting(home.root, "titles") == "text"
        with (
            home_lock(home, LOCK_WAIT_S),
            Index(home, budget_bytes, response_limits=limits, keeps_texts=keeps_texts) as index,
        ):
            if must_be_sound:
                repair_damage(index)
            return work(index)
    except (HomeLockedError, IndexStoreError, UnknownSessionError, PinLimitError) as error:
        raise OperationRefusedError(str(error)) from error


# ---- calls of the two processes


def request_proxy(home: Home, path: str, reply_type: type[T], timeout_s: float, request: object = None) -> T:
    """Reply of the running proxy: to a POST with a request, else to a GET.

    Raises ProxyNotRunningError where none runs, OperationRefusedError where it refuses.
    """
    proxy = _read_announcement(home.run / "proxy.json")
    if not proxy.url:
        raise ProxyNotRunningError(f"no proxy runs on {home.root} (start `warmline serve`)")
    killed = ProxyNotRunningError(f"no proxy answers at {proxy.url}, though {home.run / 'proxy.json'} names it")
    if find_lock_holder(home.lock) != str(proxy.pid):  # another process that listens there must not get our secret
        raise killed
    try:
        secret = home.load_secret()
    except OSError as error:
        raise OperationRefusedError(f"without the home's secret the proxy can't be asked: {error}") from error
    try:
        return _send_request(proxy.url, secret, path, request, reply_type, timeout_s)
    except ConnectionRefusedError as error:
        raise killed from error


def proxy_url(home: Home) -> str:
    """URL that a proxy of this home announced; "" where none did.  A killed proxy leaves its announcement."""
    return _read_announcement(home.run / "proxy.json").url


def read_announced_ports(home: Home) -> tuple[int, int]:
    """Ports of proxy and backend, as those that run, or were killed, announced them; 0 where none did."""
    url, port = proxy_url(home), 0
    with suppress(ValueError):  # the file may have anything
        port = urlsplit(url).port or 0
    return port, _read_announcement(home.backend_state).port


def list_backends(home: Home) -> list[Home]:
    """Home as each of its backends has it, by their files: first the only one, or the keeper of the others."""
    files = [file for suffix in ("lock", "pid", "json") for file in home.run.glob(f"{home.backend_name}-*.{suffix}")]
    names = {file.stem for file in files}
    return [home, *(Home(home.root, name.removeprefix(f"{home.backend_name}-")) for name in sorted(names))]


def _read_announcement(file: Path) -> _Announcement:
    """Announcement of a process; an empty one where none can be read."""
    try:
        return decode(disk.read_file(file), _Announcement)
    except (OSError, msgspec.MsgspecError):
        return _Announcement()


def _send_request(url: str, secret: str, path: str, request: object, reply_type: type[T], timeout_s: float) -> T:
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    data = None if request is None else encode(request)
    call = Request(url + path, data=data, headers=headers, method="GET" if data is None else "POST")
    direct = build_opener(ProxyHandler({}))  # on this machine, whatever http_proxy says
    try:
        with direct.open(call, timeout=timeout_s) as answer:
            return decode(answer.read(), reply_type)
    except HTTPError as error:
        raise _make_refusal(url, error.code, error.read()) from error
    except URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            raise error.reason from error
        raise OperationRefusedError(f"can't reach the proxy at {url}: {error.reason}") from error
    except (OSError, HTTPException, msgspec.MsgspecError) as error:
        raise OperationRefusedError(f"the proxy at {url} gave no answer: {error}") from error


def _make_refusal(url: str, status: int, body: bytes) -> OperationRefusedError:
    """Error of a refusal; without the proxy's envelope it names the URL: another server may listen there by now."""
    try:
        return ProxyRefusedError(decode(body, ErrorReply).error.message, status)
    except msgspec.DecodeError:
        return OperationRefusedError(f"the proxy at {url} answered {status}: {parse_error_message(body)}")


def _clear_backend_caches(home: Home) -> str:
    """Clear all KV of conversations in the memory of each backend.  Returns the problems; "" for success or none."""
    return "; ".join(filter(None, map(_clear_backend_cache, list_backends(home))))


def _clear_backend_cache(home: Home) -> str:
    if not (pid := find_lock_holder(home.backend_lock)):
        return ""
    name = f"the backend of {home.instance}" if home.instance else "the backend"
    backend = _read_announcement(home.backend_state)  # a flag may have set the port
    port = backend.port if str(backend.pid) == pid else 0 if home.instance else read_setting(home.root, "backend_port")
    why = _send_clear_cache(home, port) if port else "has not announced its port"
    return f"{name}, process {pid}, {why}; its KV in memory may be stored again: restart it" if why else ""


def _send_clear_cache(home: Home, port: int) -> str:
    """Have the process on this port clear its KV.  Returns the problem; "" for success, and for a keeper, with none."""
    connection = HTTPConnection("127.0.0.1", port, timeout=BACKEND_TIMEOUT_S)
    try:
        if not home.instance and _is_keeper(connection):
            return ""
        connection.request("POST", "/kv/forget", headers={"Authorization": f"Bearer {home.load_secret()}"})
        status = connection.getresponse().status
        return "" if status == 200 else f"answered {status}"
    except (OSError, HTTPException) as error:
        return f"can't be reached on port {port}: {error}"
    finally:
        connection.close()


def _is_keeper(connection: HTTPConnection) -> bool:
    """True for the keeper of several backends, which are asked one by one."""
    connection.request("GET", "/health")
    try:
        return decode(connection.getresponse().read(), _Health).keeper
    except msgspec.MsgspecError:
        return False
