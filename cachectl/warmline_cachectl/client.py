"""Access to a home: its index is read directly, and changed through the proxy, or under the home's lock where none
runs.

    CachectlError                  the reason is for people
    ├── HomeNotFoundError          no such home, or nothing was ever stored in it
    ├── ProxyNotRunningError       none runs on this home
    └── OperationRefusedError      another process holds the home, or the operation failed
        └── ProxyRefusedError      the proxy refused, in its own words
"""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from warmline_common.process.arguments import GB
from warmline_common.protocol.messages import ErrorReply, decode, encode, parse_error_message
from warmline_common.settings.resolve import read_setting
from warmline_common.storage.file_lock import find_lock_holder
from warmline_common.storage.home import Home
from warmline_proxy.auth.key_store import KeyNotFoundError, KeyStoreError
from warmline_proxy.auth.owners import KeyTenants, OwnerLabels, find_fingerprints, load_key_tenants
from warmline_proxy.auth.owners import build_owner_labels as whose_by_keys
from warmline_proxy.home_lock import HomeLockedError, home_lock
from warmline_proxy.index.index import Index, IndexReader, IndexStoreError
from warmline_proxy.index.recovery import orphans as strays
from warmline_proxy.index.recovery.repair import repair as repair_index
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.pin import PinLimitError, UnknownSessionError
from warmline_proxy.retention.pin import pin_session as pin_in
from warmline_proxy.retention.purge import purge as purge_index
from warmline_proxy.retention.purge import resolve_key
from warmline_proxy.store.crash_probe import is_readable
from warmline_proxy.store.errors import IndexMissingError
from warmline_proxy.store.rows import (
    GcReply,
    GcRequest,
    IndexSnapshot,
    PinReply,
    PinRequest,
    PurgeReply,
    PurgeRequest,
    RepairReply,
    ReplayReply,
    ReplayRequest,
    SegmentRow,
)


def read_disk_budget_bytes(home: Home) -> int:
    return int(read_setting(home.root, "disk_budget_gb") * GB)


def read_key_tenants(home: Home) -> KeyTenants:
    """The client keys in the home, and the one that the settings name.  Raises UnreadableKeysError."""
    return load_key_tenants(
        home, client_key=read_setting(home.root, "client_key"), share_cache=read_setting(home.root, "share_cache")
    )


TIMEOUT_S = 30.0
BACKEND_PORT = 8025  # as in the table of settings


def purge_backend(home: Home) -> str:
    """Have it forget all conversations; why that could not be, "" where it has or where none runs."""
    if not (pid := find_lock_holder(home.backend_lock)):
        return ""
    port = _read_port(home, pid)
    headers = {"Authorization": f"Bearer {home.load_secret()}"}
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/kv/forget", headers=headers)
        if (status := connection.getresponse().status) == 200:
            return ""
        why = f"answered {status}"
    except (OSError, HTTPException) as error:
        why = f"can't be reached on port {port}: {error}"
    finally:
        connection.close()
    return f"the backend, process {pid}, {why}; what it holds in memory may be stored again: restart it"


def _read_port(home: Home, pid: str) -> int:
    """Port that the process with this pid announced: a flag may have set it.  Else the settings' port."""
    try:
        told = json.loads((home.run / "backend.json").read_text())
        if str(told["pid"]) == pid:
            return int(told["port"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # it could not write it down
    return int(read_setting(home.root, "backend_port"))


REPAIR_TIMEOUT_S = 24 * 3600.0  # every byte that is stored is read
CHANGE_TIMEOUT_S = 600.0  # the proxy answers when the files are gone and the index is compacted
LOCK_WAIT_S = 0.5  # who only looks whether it is held, holds it for a moment
OWNERS_TIMEOUT_S = 2.0  # a proxy that hangs keeps nobody from looking
REPLAY_TIMEOUT_S = 24 * 3600.0  # it waits for others, and computes long prompts from their first token

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
    """The message is what it would be without a proxy; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def open_reader(home: Home) -> IndexReader:
    """Works whether a proxy runs or not.  Raises CannotDo."""
    check_home(home)
    try:
        return IndexReader(home)
    except IndexMissingError as error:
        raise HomeNotFoundError(f"{error} (nothing was ever stored there)") from error
    except IndexStoreError as error:
        raise OperationRefusedError(str(error)) from error


def read_owner_labels(home: Home, snapshot: IndexSnapshot) -> OwnerLabels:
    """Labels of owners: from the running proxy, which may have settings that no other process knows; else from the
    home's files, a header for each root.

    Raises OperationRefusedError where the keys can't be read.
    """
    with suppress(CachectlError):
        return request_proxy(home, "/warmline/whose", OwnerLabels, OWNERS_TIMEOUT_S)
    return _read_owner_labels_locally(home, snapshot.segments.values())


def read_owner_labels_if_readable(home: Home, snapshot: IndexSnapshot) -> OwnerLabels:
    """The same; where the keys can't be read, that of nothing it is known."""
    try:
        return read_owner_labels(home, snapshot)
    except OperationRefusedError:
        return OwnerLabels()


def _read_owner_labels_locally(home: Home, rows: Iterable[SegmentRow]) -> OwnerLabels:
    try:
        return whose_by_keys(read_key_tenants(home), find_fingerprints(home, rows))
    except KeyStoreError as error:
        raise OperationRefusedError(str(error)) from error


def _resolve_roots(home: Home, index: Index, request: PurgeRequest) -> PurgeRequest:
    try:
        return resolve_key(
            request, _read_owner_labels_locally(home, index.segments()) if request.key else OwnerLabels()
        )
    except KeyNotFoundError as error:
        raise OperationRefusedError(str(error)) from error


def check_readable(home: Home) -> None:
    """Raises Refused where reading the index through would end this process, IndexFailure."""
    if not is_readable(home.index):
        raise OperationRefusedError(
            f"the index in {home.index} is damaged: no process gets through it; add --repair, or start a proxy"
        )


def purge(home: Home, request: PurgeRequest) -> PurgeReply:
    """Raises CannotDo."""

    def here(index: Index) -> PurgeReply:
        reply = purge_index(index, _resolve_roots(home, index, request))
        if request.dry_run:
            return reply
        why = purge_backend(home)
        strays.delete_leftovers(index)
        if not why:
            index.clear_purge_notice()
        else:
            raise OperationRefusedError(f"it is gone from the disk, but {why}")
        return reply

    return change_index(home, "/warmline/purge", request, PurgeReply, CHANGE_TIMEOUT_S, here)


def pin(home: Home, request: PinRequest) -> PinReply:
    """Raises CannotDo."""
    return change_index(
        home, "/warmline/pin", request, PinReply, CHANGE_TIMEOUT_S, lambda index: pin_in(index, request)
    )


def gc(home: Home, request: GcRequest) -> GcReply:
    """Raises CannotDo."""
    return change_index(
        home,
        "/warmline/gc",
        request,
        GcReply,
        CHANGE_TIMEOUT_S,
        lambda index: collect_garbage(index, request, is_saving=False),
    )


def repair(home: Home) -> RepairReply:
    """Raises CannotDo."""
    check_home(home)
    if not (home.index.is_dir() or home.segments.is_dir()):
        raise HomeNotFoundError(f"no index in {home.index} (nothing was ever stored there)")

    def here(index: Index) -> RepairReply:
        index.is_damaged(force_probe=True)
        return repair_index(index, deep=True, is_saving=False)

    return change_index(home, "/warmline/repair", {}, RepairReply, REPAIR_TIMEOUT_S, here)


def replay(home: Home, request: ReplayRequest) -> ReplayReply:
    """By the proxy alone: it takes a model.  Raises CannotDo."""
    try:
        return request_proxy(home, "/warmline/replay", ReplayReply, REPLAY_TIMEOUT_S, request)
    except ProxyNotRunningError as error:
        raise OperationRefusedError(
            "a replay computes: it needs the pair, which does not run on this home (start `warmline serve`)"
        ) from error


def change_index(
    home: Home, path: str, request: object, reply_type: type[T], timeout_s: float, change_locally: Callable[[Index], T]
) -> T:
    """Reply of the proxy where one runs, else of `change_locally` under the home's lock.  Raises CachectlError."""
    with suppress(ProxyNotRunningError):
        return request_proxy(home, path, reply_type, timeout_s, request)
    return run_locked(home, change_locally)


def run_locked(home: Home, work: Callable[[Index], T]) -> T:
    """Result of a function that runs under the home's lock.  Raises OperationRefusedError."""
    try:
        with home_lock(home, LOCK_WAIT_S), Index(home, read_disk_budget_bytes(home)) as index:
            return work(index)
    except (HomeLockedError, IndexStoreError, UnknownSessionError, PinLimitError) as error:
        raise OperationRefusedError(str(error)) from error


def request_proxy(home: Home, path: str, reply_type: type[T], timeout_s: float, request: object = None) -> T:
    """Reply of the running proxy: to a POST with a request, else to a GET.

    Raises ProxyNotRunningError where none runs, OperationRefusedError where it refuses.
    """
    url, pid = _read_announcement(home)
    if not url:
        raise ProxyNotRunningError(f"no proxy runs on {home.root} (start `warmline serve`)")
    killed = ProxyNotRunningError(f"no proxy answers at {url}, though {home.run / 'proxy.json'} names it")
    if find_lock_holder(home.lock) != pid:  # whoever listens there by now must not hear our secret
        raise killed
    try:
        return _send_request(url, _read_secret(home), path, request, reply_type, timeout_s)
    except ConnectionRefusedError as error:
        raise killed from error


def _read_secret(home: Home) -> str:
    try:
        return home.load_secret()
    except OSError as error:
        raise OperationRefusedError(f"without the home's secret the proxy can't be asked: {error}") from error


def check_home(home: Home) -> None:
    """Raises NoHome."""
    if not home.root.is_dir():
        raise HomeNotFoundError(f"no home at {home.root} (name one with --home or WARMLINE_HOME)")


def proxy_url(home: Home) -> str:
    """URL that a proxy of this home announced; "" where none did.  A killed proxy leaves its announcement."""
    return _read_announcement(home)[0]


def _read_announcement(home: Home) -> tuple[str, str]:
    """A proxy's address and pid, as it told them; "" where none did, or nobody can be asked there."""
    try:
        told = json.loads((home.run / "proxy.json").read_text())
        url, pid = str(told["url"]), str(told["pid"])
        return (url, pid) if urlsplit(url).scheme == "http" else ("", "")
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""


def _send_request(url: str, secret: str, path: str, request: object, reply_type: type[T], timeout_s: float) -> T:
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    data = None if request is None else encode(request)
    call = Request(url + path, data=data, headers=headers, method="GET" if data is None else "POST")
    direct = build_opener(ProxyHandler({}))  # it is on this machine, whatever http_proxy says
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
    """Error of a refusal; one without the proxy's envelope names its sender: another server may listen there by now."""
    try:
        return ProxyRefusedError(decode(body, ErrorReply).error.message, status)
    except msgspec.DecodeError:
        return OperationRefusedError(f"the proxy at {url} answered {status}: {parse_error_message(body)}")
