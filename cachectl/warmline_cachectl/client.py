"""How cachectl reaches a home: reading its index directly, changing it through the proxy, or itself where none runs.

CannotDo       the reason is for people
├── NoHome     no such home, or nothing was ever stored in it
├── NoProxy    none runs on this home
└── Refused    another process holds the home, or it can't be done
    └── RefusedByProxy    the proxy said no, in its own words
"""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.client import HTTPException
from typing import TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from warmline_cachectl import configured
from warmline_cachectl.upstream import forget_in_backend
from warmline_common.protocol.messages import ErrorReply, decode, encode, message_in
from warmline_common.storage.file_lock import holder_of
from warmline_common.storage.home import Home
from warmline_proxy.auth.key_store import KeysUnusable, NoSuchKey
from warmline_proxy.auth.owners import Whose, models_of
from warmline_proxy.auth.owners import whose as whose_by_keys
from warmline_proxy.home_lock import HomeLocked, home_lock
from warmline_proxy.index.index import Index, IndexFailure, IndexReader, NoIndex
from warmline_proxy.index.recovery import orphans as strays
from warmline_proxy.index.recovery.repair import repair as repair_index
from warmline_proxy.retention.gc import collect
from warmline_proxy.retention.pin import NotStored, TooMuchPinned
from warmline_proxy.retention.pin import pin as pin_in
from warmline_proxy.retention.purge import by_roots
from warmline_proxy.retention.purge import purge as purge_index
from warmline_proxy.store.crash_probe import is_readable
from warmline_proxy.store.rows import (
    GcReply,
    GcRequest,
    PinReply,
    PinRequest,
    PurgeReply,
    PurgeRequest,
    RepairReply,
    ReplayReply,
    ReplayRequest,
    SegmentRow,
    Snapshot,
)

REPAIR_TIMEOUT_S = 24 * 3600.0  # every byte that is stored is read
CHANGE_TIMEOUT_S = 600.0  # the proxy answers when the files are gone and the index is compacted
LOCK_WAIT_S = 0.5  # who only looks whether it is held, holds it for a moment
WHOSE_TIMEOUT_S = 2.0  # a proxy that hangs keeps nobody from looking
REPLAY_TIMEOUT_S = 24 * 3600.0  # it waits for others, and computes long prompts from their first token

T = TypeVar("T")


class CannotDo(Exception):
    pass


class NoHome(CannotDo):
    pass


class NoProxy(CannotDo):
    pass


class Refused(CannotDo):
    pass


class RefusedByProxy(Refused):
    """The message is what it would be without a proxy; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def open_reader(home: Home) -> IndexReader:
    """Works whether a proxy runs or not.  Raises CannotDo."""
    check_home(home)
    try:
        return IndexReader(home)
    except NoIndex as error:
        raise NoHome(f"{error} (nothing was ever stored there)") from error
    except IndexFailure as error:
        raise Refused(str(error)) from error


def whose(home: Home, snapshot: Snapshot) -> Whose:
    """Whose what is stored is: as the proxy says where one runs, which may have been given settings that nobody else
    knows of; else by the home's files, a header for each root.  Raises Refused where the keys can't be read.
    """
    with suppress(CannotDo):
        return ask(home, "/warmline/whose", Whose, WHOSE_TIMEOUT_S)
    return _whose_here(home, snapshot.segments.values())


def whose_as_far_as_known(home: Home, snapshot: Snapshot) -> Whose:
    """The same; where the keys can't be read, that of nothing it is known."""
    try:
        return whose(home, snapshot)
    except Refused:
        return Whose()


def _whose_here(home: Home, rows: Iterable[SegmentRow]) -> Whose:
    try:
        return whose_by_keys(configured.key_holders(home), models_of(home, rows))
    except KeysUnusable as error:
        raise Refused(str(error)) from error


def _by_roots(home: Home, index: Index, request: PurgeRequest) -> PurgeRequest:
    try:
        return by_roots(request, _whose_here(home, index.segments()) if request.key else Whose())
    except NoSuchKey as error:
        raise Refused(str(error)) from error


def check_readable(home: Home) -> None:
    """Raises Refused where reading the index through would end this process, IndexFailure."""
    if not is_readable(home.index):
        raise Refused(
            f"the index in {home.index} is damaged: no process gets through it; add --repair, or start a proxy"
        )


def purge(home: Home, request: PurgeRequest) -> PurgeReply:
    """Raises CannotDo."""

    def here(index: Index) -> PurgeReply:
        reply = purge_index(index, _by_roots(home, index, request))
        if request.dry_run:
            return reply
        why = forget_in_backend(home)
        strays.clear(index)
        if not why:
            index.note_told()
        else:
            raise Refused(f"it is gone from the disk, but {why}")
        return reply

    return changed(home, "/warmline/purge", request, PurgeReply, CHANGE_TIMEOUT_S, here)


def pin(home: Home, request: PinRequest) -> PinReply:
    """Raises CannotDo."""
    return changed(home, "/warmline/pin", request, PinReply, CHANGE_TIMEOUT_S, lambda index: pin_in(index, request))


def gc(home: Home, request: GcRequest) -> GcReply:
    """Raises CannotDo."""
    return changed(
        home, "/warmline/gc", request, GcReply, CHANGE_TIMEOUT_S, lambda index: collect(index, request, saving=False)
    )


def repair(home: Home) -> RepairReply:
    """Raises CannotDo."""
    check_home(home)
    if not (home.index.is_dir() or home.segments.is_dir()):
        raise NoHome(f"no index in {home.index} (nothing was ever stored there)")

    def here(index: Index) -> RepairReply:
        index.is_damaged(probed=True)
        return repair_index(index, deep=True, saving=False)

    return changed(home, "/warmline/repair", {}, RepairReply, REPAIR_TIMEOUT_S, here)


def replay(home: Home, request: ReplayRequest) -> ReplayReply:
    """By the proxy alone: it takes a model.  Raises CannotDo."""
    try:
        return ask(home, "/warmline/replay", ReplayReply, REPLAY_TIMEOUT_S, request)
    except NoProxy as error:
        raise Refused(
            "a replay computes: it needs the pair, which does not run on this home (start `warmline serve`)"
        ) from error


def changed(home: Home, path: str, request: object, kind: type[T], timeout_s: float, here: Callable[[Index], T]) -> T:
    """What the proxy answers where one runs, else what `here` does, under the lock that it would hold.

    Raises CannotDo.
    """
    with suppress(NoProxy):
        return ask(home, path, kind, timeout_s, request)
    return owned(home, here)


def owned(home: Home, here: Callable[[Index], T]) -> T:
    """What `here` does, under the lock that a proxy would hold.  Raises Refused."""
    try:
        with home_lock(home, LOCK_WAIT_S), Index(home, configured.disk_budget_bytes(home)) as index:
            return here(index)
    except (HomeLocked, IndexFailure, NotStored, TooMuchPinned) as error:
        raise Refused(str(error)) from error


def ask(home: Home, path: str, kind: type[T], timeout_s: float, request: object = None) -> T:
    """What the running proxy answers: to a POST with a request, else to a GET.

    Raises NoProxy where none runs, Refused where it says no.
    """
    url, pid = _announced(home)
    if not url:
        raise NoProxy(f"no proxy runs on {home.root} (start `warmline serve`)")
    killed = NoProxy(f"no proxy answers at {url}, though {home.run / 'proxy.json'} names it")
    if holder_of(home.lock) != pid:  # whoever listens there by now must not hear our secret
        raise killed
    try:
        return _ask_proxy(url, _secret(home), path, request, kind, timeout_s)
    except ConnectionRefusedError as error:
        raise killed from error


def _secret(home: Home) -> str:
    try:
        return home.secret()
    except OSError as error:
        raise Refused(f"without the home's secret the proxy can't be asked: {error}") from error


def check_home(home: Home) -> None:
    """Raises NoHome."""
    if not home.root.is_dir():
        raise NoHome(f"no home at {home.root} (name one with --home or WARMLINE_HOME)")


def proxy_url(home: Home) -> str:
    """Where a proxy of this home said that it listens; "" where none did.  One that was killed left its address."""
    return _announced(home)[0]


def _announced(home: Home) -> tuple[str, str]:
    """A proxy's address and pid, as it told them; "" where none did, or nobody can be asked there."""
    try:
        told = json.loads((home.run / "proxy.json").read_text())
        url, pid = str(told["url"]), str(told["pid"])
        return (url, pid) if urlsplit(url).scheme == "http" else ("", "")
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""


def _ask_proxy(url: str, secret: str, path: str, request: object, kind: type[T], timeout_s: float) -> T:
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    data = None if request is None else encode(request)
    call = Request(url + path, data=data, headers=headers, method="GET" if data is None else "POST")
    direct = build_opener(ProxyHandler({}))  # it is on this machine, whatever http_proxy says
    try:
        with direct.open(call, timeout=timeout_s) as answer:
            return decode(answer.read(), kind)
    except HTTPError as error:
        raise _refusal(url, error.code, error.read()) from error
    except URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            raise error.reason from error
        raise Refused(f"can't reach the proxy at {url}: {error.reason}") from error
    except (OSError, HTTPException, msgspec.MsgspecError) as error:
        raise Refused(f"the proxy at {url} gave no answer: {error}") from error


def _refusal(url: str, status: int, body: bytes) -> Refused:
    """What is no error of the proxy's own says who sent it: something else may listen there by now."""
    try:
        return RefusedByProxy(decode(body, ErrorReply).error.message, status)
    except msgspec.DecodeError:
        return Refused(f"the proxy at {url} answered {status}: {message_in(body)}")
