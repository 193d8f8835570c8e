"""How cachectl reaches a home: reading its index directly, changing it through the proxy, or itself where none runs.

CannotDo       the reason is for people
├── NoHome     no such home, or nothing was ever stored in it
└── Refused    the proxy said no, or another process holds the home
"""

import json
import sys
from http.client import HTTPException
from typing import TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from warmline_proxy.index import Index, IndexFailure, IndexReader, NoIndex
from warmline_proxy.index_probe import is_readable
from warmline_proxy.lock import HomeLocked, home_lock
from warmline_proxy.purge import purge as purge_index
from warmline_proxy.repair import repair as repair_index
from warmline_proxy.rows import PurgeReply, PurgeRequest, RepairReply, ReplayReply, ReplayRequest
from warmline_wire.home import Home
from warmline_wire.messages import decode, encode, message_in

REPAIR_TIMEOUT_S = 24 * 3600.0  # every byte that is stored is read
PURGE_TIMEOUT_S = 600.0  # the proxy answers when the files are gone and the index is compacted
REPLAY_TIMEOUT_S = 24 * 3600.0  # it waits for others, and computes long prompts from their first token

T = TypeVar("T")


class CannotDo(Exception):
    pass


class NoHome(CannotDo):
    pass


class Refused(CannotDo):
    pass


def open_reader(home: Home) -> IndexReader:
    """Works whether a proxy runs or not.  Raises CannotDo."""
    _check_home(home)
    try:
        return IndexReader(home)
    except NoIndex as error:
        raise NoHome(f"{error} (nothing was ever stored there)") from error
    except IndexFailure as error:
        raise Refused(str(error)) from error


def check_readable(home: Home) -> None:
    """Raises Refused where reading the index through would end this process, IndexFailure."""
    if not is_readable(home.index):
        raise Refused(
            f"the index in {home.index} is damaged: no process gets through it; add --repair, or start a proxy"
        )


def purge(home: Home, request: PurgeRequest) -> PurgeReply:
    """By the proxy where one runs, else here, under the lock that it would hold.  Raises Refused."""
    if url := _proxy_url(home):
        try:
            return _ask_proxy(url, home.secret(), "/warmline/purge", request, PurgeReply, PURGE_TIMEOUT_S)
        except ConnectionRefusedError:
            pass  # it was killed, and left its address behind
    try:
        with home_lock(home), Index(home, sys.maxsize) as index:
            return purge_index(index, request)
    except (HomeLocked, IndexFailure) as error:
        raise Refused(str(error)) from error


def repair(home: Home) -> RepairReply:
    """By the proxy where one runs, else here.  Raises CannotDo."""
    _check_home(home)
    if not (home.index.is_dir() or home.segments.is_dir()):
        raise NoHome(f"no index in {home.index} (nothing was ever stored there)")
    if url := _proxy_url(home):
        try:
            return _ask_proxy(url, home.secret(), "/warmline/repair", {}, RepairReply, REPAIR_TIMEOUT_S)
        except ConnectionRefusedError:
            pass  # it was killed, and left its address behind
    try:
        with home_lock(home), Index(home, sys.maxsize) as index:
            index.is_damaged(probed=True)
            return repair_index(index, deep=True, saving=False)
    except (HomeLocked, IndexFailure) as error:
        raise Refused(str(error)) from error


def replay(home: Home, request: ReplayRequest) -> ReplayReply:
    """By the proxy alone: it takes a model.  Raises CannotDo."""
    needed = "a replay computes: it needs the pair, which does not run on this home (start `warmline serve`)"
    if not (url := _proxy_url(home)):
        raise Refused(needed)
    try:
        return _ask_proxy(url, home.secret(), "/warmline/replay", request, ReplayReply, REPLAY_TIMEOUT_S)
    except ConnectionRefusedError as error:
        raise Refused(needed) from error


def _check_home(home: Home) -> None:
    if not home.root.is_dir():
        raise NoHome(f"no home at {home.root} (name one with --home or WARMLINE_HOME)")


def _proxy_url(home: Home) -> str:
    try:
        return str(json.loads((home.run / "proxy.json").read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _ask_proxy(url: str, secret: str, path: str, request: object, kind: type[T], timeout_s: float) -> T:
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    call = Request(url + path, data=encode(request), headers=headers, method="POST")
    direct = build_opener(ProxyHandler({}))  # it is on this machine, whatever http_proxy says
    try:
        with direct.open(call, timeout=timeout_s) as answer:
            return decode(answer.read(), kind)
    except HTTPError as error:
        raise Refused(f"the proxy at {url} answered {error.code}: {message_in(error.read())}") from error
    except URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            raise error.reason from error
        raise Refused(f"can't reach the proxy at {url}: {error.reason}") from error
    except (OSError, HTTPException, msgspec.MsgspecError) as error:
        raise Refused(f"the proxy at {url} gave no answer: {error}") from error
