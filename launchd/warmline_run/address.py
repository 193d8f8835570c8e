"""Addresses that clients connect to, and the example command for a newcomer."""

import json
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from warmline_common.process.loopback import is_loopback
from warmline_common.settings.hints import format_command
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig

ANY_ADDRESS = "0.0.0.0"
PROBE_HOSTS = {ANY_ADDRESS: "127.0.0.1", "::": "::1"}  # a wildcard address is no address to connect to
LOOKUP_TIMEOUT_S = 2.0
EXAMPLE_URL = "http://127.0.0.1:8026/v1"
CHAT_PATH = "/chat/completions"


@dataclass(frozen=True)
class Address:
    """Address that the proxy listens on."""

    host: str
    port: int
    key: str = ""  # of the settings; there may be others in the home
    home: str = ""

    @property
    def url(self) -> str:
        """Base URL for other machines, where they can connect."""
        return format_url(_list_host_names()[0] if self.is_wildcard else self.host, self.port)

    @property
    def probe_host(self) -> str:
        return PROBE_HOSTS.get(self.host, self.host)

    @property
    def admin_url(self) -> str:
        """URL of the dashboard on this machine."""
        return f"{format_url(self.probe_host, self.port).removesuffix('/v1')}/admin"

    @property
    def is_local(self) -> bool:
        """True where a local name reaches the address from this machine."""
        return is_loopback(self.probe_host)

    @property
    def is_wildcard(self) -> bool:
        return self.host in PROBE_HOSTS

    @property
    def alternatives_line(self) -> str:
        """A line with further ways to reach a wildcard address: names in .local are not known everywhere."""
        if not self.is_wildcard:
            return ""
        urls = [format_url(host, self.port) for host in (*_list_host_names()[1:], self.probe_host)]
        return f"also {' and '.join(urls)}\n"

    def curl_command(self, needs_key: bool, model: str = "") -> str:
        """A first request, to be pasted.  `needs_key`: the proxy refuses requests without a key."""
        key = f' -H "Authorization: Bearer {self._key_expression()}"' if needs_key or self.key else ""
        named = {"model": model} if model else {}
        body = json.dumps({**named, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
        return f"curl {self.url}/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"

    def _key_expression(self) -> str:
        if self.key:
            return "$WARMLINE_CLIENT_KEY"
        return f"$({format_command(format_program('cachectl') + ' key show', self.home)})"


def make_address(config: ResolvedConfig) -> Address:
    """Address by the settings, as the proxy finds it: `lan` opens a host that is loopback."""
    host = str(config["host"])
    return Address(
        host=ANY_ADDRESS if config["lan"] and is_loopback(host) else host,
        port=int(config["port"]),
        key=str(config["client_key"]),
        home=str(config["home"]),
    )


def format_program(name: str) -> str:
    """Command of ours as a shell finds it: its name where PATH leads to this installation, else its path."""
    own, on_path = Path(sys.executable).with_name(name), shutil.which(name)
    if not own.is_file() or (on_path and Path(on_path).samefile(own)):
        return name
    return shlex.quote(str(own))


def format_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def normalize_url(url: str) -> str:
    """Base URL of an API, from an address that may lack its /v1, or include the path of chat completions.

    Raises ConfigurationError where it is no address of a server.
    """
    try:
        parts = urlsplit(url.strip())
        is_base = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        _ = parts.port
    except ValueError:
        is_base = None
    if not is_base:
        raise ConfigurationError(f"--url: expected an address such as {EXAMPLE_URL}, not {url!r}")
    path = parts.path.rstrip("/").removesuffix(CHAT_PATH)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def _list_host_names() -> list[str]:
    """Names of this machine for others, the likeliest first: Linux often lacks mDNS, and then has no name in .local."""
    names = [name for name in (bonjour_name(), lan_address()) if name]
    return names if sys.platform == "darwin" else names[::-1]


def bonjour_name() -> str:
    """This machine's name in .local: a Mac may have another host name by DHCP."""
    name = socket.gethostname().partition(".")[0]
    if sys.platform == "darwin":
        command = ("/usr/sbin/scutil", "--get", "LocalHostName")
        with suppress(OSError, subprocess.SubprocessError):
            output = subprocess.run(command, capture_output=True, text=True, timeout=LOOKUP_TIMEOUT_S, check=True)
            name = output.stdout.strip() or name
    return f"{name.lower()}.local"


def lan_address() -> str:
    """This machine's address in packets to others; "" where no route leads to them.  Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation, which no machine has
        except OSError:
            return ""
        return str(probe.getsockname()[0])
