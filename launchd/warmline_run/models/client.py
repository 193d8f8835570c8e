"""Client of the proxy's routes for models.  Blocks.

ModelsCommandError             the message is for people; `exit_code` is the command's
├── NoProxyError               no proxy runs on the home, or it can't be asked
└── ModelRefusedError          the proxy refused, in its own words
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from warmline_common.protocol.messages import convert
from warmline_common.settings.hints import format_command
from warmline_common.storage.home import Home
from warmline_run import ports, probe
from warmline_run.address import Address

PATH = "/warmline/models"
LOAD_TIMEOUT_S = 1800.0  # the weights of the largest models take minutes to read
CHANGE_TIMEOUT_S = 120.0  # a model that is unloaded saves its conversations first
LIST_TIMEOUT_S = 10.0
EXIT_NOT_FOUND, EXIT_REFUSED = 1, 3  # as cachectl has them


class ModelsCommandError(Exception):
    exit_code = EXIT_REFUSED


class NoProxyError(ModelsCommandError):
    pass


class ModelRefusedError(ModelsCommandError):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_code = EXIT_NOT_FOUND if status == 404 else EXIT_REFUSED


class ListedModel(msgspec.Struct, kw_only=True):
    """One model as the proxy tells it.  Bytes are 0 while they are unknown."""

    name: str
    stage: str
    aliases: list[str] = []
    default: bool = False
    pinned: bool = False
    idle_s: float = 0.0
    weight_bytes: int = 0
    need_bytes: int = 0
    held_bytes: int = 0
    kv_bytes: int = 0
    running: int = 0
    waiting: int = 0
    last_used_at: float = 0.0  # Unix time; 0: never
    load_s: float = 0.0
    reason: str = ""
    wait_reason: str = ""


class ModelList(msgspec.Struct, kw_only=True):
    """`keeper` is False for a pair of one model, which stays loaded."""

    models: list[ListedModel]
    memory_bytes: int = 0
    keeper: bool = False
    keeper_problem: str = ""


class ModelsClient:
    """Requests to the running proxy of a home.  Each returns the answer's JSON, or raises ModelsCommandError."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def list_models(self) -> dict[str, Any]:
        return self._request("", None, LIST_TIMEOUT_S)

    def load(self, name: str, *, wait: bool) -> dict[str, Any]:
        return self._request(f"/{quote(name, safe='')}/load", {"wait": wait}, LOAD_TIMEOUT_S)

    def unload(self, name: str) -> dict[str, Any]:
        return self._request(f"/{quote(name, safe='')}/unload", {}, CHANGE_TIMEOUT_S)

    def pin(self, name: str, *, pinned: bool) -> dict[str, Any]:
        return self._request(f"/{quote(name, safe='')}/pin", {"pinned": pinned}, CHANGE_TIMEOUT_S)

    def _request(self, path: str, body: Mapping[str, object] | None, timeout_s: float) -> dict[str, Any]:
        address = self._find_address()
        try:
            secret = Home(self._home).read_secret()
            status, answer = probe.send(address, PATH + path, secret, body, timeout_s)
        except ConnectionRefusedError:
            raise self._make_not_running_error() from None
        except TimeoutError:
            raise NoProxyError(
                f"the proxy did not answer in {timeout_s:g} s; `warmline models ls` shows more"
            ) from None
        except probe.CONNECTION_ERRORS as error:
            raise NoProxyError(f"the proxy can't be asked: {error or type(error).__name__}") from None
        if status != 200:
            raise ModelRefusedError(_read_refusal(status, answer), status)
        return answer

    def _find_address(self) -> Address:
        """Address of the proxy that holds the home: another program must not receive the home's secret."""
        proxy = ports.find_running_proxy(self._home)
        if proxy is None:
            raise self._make_not_running_error()
        try:
            url = urlsplit(proxy.url)
            return Address(url.hostname or "", url.port or 0)
        except ValueError:
            raise NoProxyError(f"{self._home / 'run' / 'proxy.json'} names no address: {proxy.url}") from None

    def _make_not_running_error(self) -> NoProxyError:
        start = format_command("warmline serve", str(self._home))
        return NoProxyError(f"no proxy runs on {self._home} (start `{start}`)")


def parse_models_answer(answer: Mapping[str, Any]) -> ModelList:
    """Raises ModelsCommandError for an answer of another form."""
    try:
        return convert(answer, ModelList)
    except msgspec.ValidationError as error:
        raise ModelsCommandError(f"the proxy answered otherwise than expected (another version?): {error}") from None


def _read_refusal(status: int, answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return f"the proxy answered {status}" + (" (another version?)" if status in (404, 405) else "")
