"""The server that a client is launched for: where it listens, its models, and the key that it wants.  Blocks.

LaunchError   one line for the user; `exit_code` is the command's
"""

import http.client
import json
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.settings.hints import format_command
from warmline_common.settings.models import find_model, parse_models
from warmline_common.settings.resolve import ResolvedConfig
from warmline_common.settings.table import SETTINGS
from warmline_run import ports, probe
from warmline_run.address import Address, format_program, make_address, normalize_url
from warmline_run.launch.clients import ModelFacts, ServerFacts
from warmline_run.processes import module_arguments

REQUEST_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 4_000_000
REFUSED = (401, 403)
NO_KEY = "unused"  # clients want some key
ANY_NAME = "any-name"


class LaunchError(Exception):
    def __init__(self, message: str, exit_code: int = EXIT_CONFIGURATION) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Server:
    """Server by its base URL, which ends in /v1.  `is_own`: it runs from the home, whose keys open it."""

    url: str
    is_own: bool = False


@dataclass(frozen=True, kw_only=True)
class LocalServer(Server):
    """Server on this machine."""

    address: Address


@dataclass(frozen=True)
class ClientKey:
    """Key for a client; `found_by` is text for a shell that is to find it, "" where it writes the key itself."""

    value: str
    found_by: str = ""

    @property
    def expression(self) -> str:
        return self.found_by or shlex.quote(self.value)

    @property
    def is_secret(self) -> bool:
        return self.value != NO_KEY


def make_remote_server(url: str) -> Server:
    """Raises ConfigurationError where `url` is no address."""
    return Server(normalize_url(url))


def find_running_server(config: ResolvedConfig) -> LocalServer | None:
    """The pair that runs from the home, or another one at the configured address; None where there is neither."""
    if proxy := ports.find_running_proxy(Path(str(config["home"]))):
        url = urlsplit(proxy.url)
        return _make_local_server(Address(url.hostname or "", url.port or 0), is_own=True)
    address = make_address(config)
    try:
        _, answer = probe.send(address, "/ready")
    except probe.CONNECTION_ERRORS:
        return None
    return _make_local_server(address, is_own=False) if "ready" in answer else None


def make_configured_server(config: ResolvedConfig) -> LocalServer:
    """The pair that would run by these settings."""
    return _make_local_server(make_address(config), is_own=True)


def _make_local_server(address: Address, *, is_own: bool) -> LocalServer:
    reached = Address(address.probe_host, address.port)
    return LocalServer(url=reached.url, address=reached, is_own=is_own)


def find_key(server: Server, config: ResolvedConfig, given: str) -> ClientKey:
    """The given key, else that of the settings, else the home's, if the server wants one.  Raises LaunchError."""
    if given:
        return ClientKey(given)
    if settings_key := str(config["client_key"]):
        return ClientKey(settings_key, f'"${SETTINGS["client_key"].variable}"')
    if _fetch(server, "")[0] not in REFUSED:
        return ClientKey(NO_KEY)
    if not server.is_own:
        raise LaunchError(f"{server.url} wants a key: set WARMLINE_CLIENT_KEY, or give --key")
    return _read_home_key(str(config["home"]))


def _read_home_key(home: str) -> ClientKey:
    """Key that `cachectl key show` prints.  It explains a failure itself."""
    arguments = [*module_arguments("warmline_cachectl.cli"), "key", "show"]
    done = subprocess.run([*arguments, "--home", home], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise LaunchError("the pair wants a client key, and the home has not one alone: give one with --key")
    return ClientKey(done.stdout.strip(), f'"$({format_command(format_program("cachectl") + " key show", home)})"')


def read_facts(server: Server, key: ClientKey, config: ResolvedConfig, model: str) -> ServerFacts:
    """Facts of a server that answers; `model` is the name of one of its models, or "".  Raises LaunchError."""
    status, answer = _fetch(server, key.value)
    if status in REFUSED:
        raise LaunchError(f"{server.url} refuses the key: give another one with --key, or set WARMLINE_CLIENT_KEY")
    try:
        listed = [ModelFacts(str(each["id"]), int(each.get("max_model_len") or 0)) for each in answer["data"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        listed = []
    if not listed:
        raise LaunchError(f"{server.url}/models lists no models ({status}): give the address of a Warmline with --url")
    return ServerFacts(server.url, _move_first(listed, model, config) if model else listed)


def _move_first(listed: Sequence[ModelFacts], model: str, config: ResolvedConfig) -> Sequence[ModelFacts]:
    """Models with the named one first: by its name, an alias that is configured here, or its folder's name."""
    configured = find_model(parse_models(str(config["models"])), model)
    wanted = (model, configured.name if configured else "", Path(model).name)
    chosen = next((each for name in wanted for each in listed if each.name == name), None)
    if chosen is None:
        names = ", ".join(each.name for each in listed)
        raise LaunchError(f"a pair runs already and has no model {model!r}: name one of {names}, or stop that pair")
    return [chosen, *(each for each in listed if each is not chosen)]


def _fetch(server: Server, key: str) -> tuple[int, dict[str, Any]]:
    """Status and answer of GET /v1/models.  Raises LaunchError where nothing answers."""
    url = urlsplit(server.url)
    connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with closing(connect(url.hostname or "", url.port, timeout=REQUEST_TIMEOUT_S)) as connection:
            connection.request("GET", f"{url.path}/models", headers=headers)
            response = connection.getresponse()
            status, body = response.status, response.read(ANSWER_BYTES_MAX)
    except probe.CONNECTION_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise LaunchError(f"nothing answers at {server.url}: {reason}; check the address, and that it runs") from None
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    return status, answer if isinstance(answer, dict) else {}
