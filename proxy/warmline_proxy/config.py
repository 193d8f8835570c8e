"""The proxy's configuration: flags and one environment variable, parsed and validated once."""

import argparse
import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from warmline_wire.flags import GB, gigabytes
from warmline_wire.home import Home

LOG_LEVELS = ("debug", "info", "warning", "error")
CLIENT_KEY_VARIABLE = "WARMLINE_CLIENT_KEY"


class ConfigError(ValueError):
    """A setting that can't be served; the message is one line for people."""


@dataclass(frozen=True)
class Config:
    """What one proxy was told.  Raises ConfigError where the settings contradict each other."""

    home: Home
    host: str = "127.0.0.1"
    port: int = 8026  # 0: any free port, told in run/proxy.json
    backend_url: str = "http://127.0.0.1:8025"
    reuse: str = "fast"  # "fast" or "off"
    disk_budget_bytes: int = 50 * GB
    queue_count_max: int = 64
    running_count_max: int = 16
    log_level: str = "info"
    client_key: str = ""
    restart_wait_s: float = 15.0  # how long a request waits for a backend that is being restarted

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.client_key:
            raise ConfigError(f"binding {self.host} opens the proxy to others: set {CLIENT_KEY_VARIABLE} first")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535")
        backend = urlsplit(self.backend_url)
        if backend.scheme != "http" or not backend.hostname:
            raise ConfigError(f"backend URL {self.backend_url!r} is not like http://127.0.0.1:8025")
        if self.disk_budget_bytes < 0:
            raise ConfigError("the disk budget is negative")
        if self.queue_count_max < 0 or self.running_count_max < 1:
            raise ConfigError("--queue-count-max must be at least 0 and --running-count-max at least 1")


def is_loopback(host: str) -> bool:
    """Whether binding `host` stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Parser(argparse.ArgumentParser):
    """argparse, but bad flags cost one line instead of a page."""

    def error(self, message: str) -> NoReturn:
        print(f"warmline_proxy: {message}", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m warmline_proxy", description="Warmline's caching reverse proxy.")
    parser.add_argument("--home", type=Path, default=Path("~/.warmline"), help="where index and segments live")
    parser.add_argument("--host", default=Config.host)
    parser.add_argument("--port", type=int, default=Config.port)
    parser.add_argument("--backend-url", default=Config.backend_url)
    parser.add_argument("--reuse", choices=("fast", "off"), default=Config.reuse)
    parser.add_argument("--disk-budget-gb", type=gigabytes, default=Config.disk_budget_bytes / GB)
    parser.add_argument("--queue-count-max", type=int, default=Config.queue_count_max)
    parser.add_argument("--running-count-max", type=int, default=Config.running_count_max)
    parser.add_argument("--log-level", choices=LOG_LEVELS, default=Config.log_level)
    return parser


def parse(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Config:
    """Flags to a Config.  Raises SystemExit(2) on a bad flag, ConfigError on bad values."""
    flags = _parser().parse_args(arguments)
    return Config(
        home=Home(flags.home.expanduser().absolute()),
        host=flags.host,
        port=flags.port,
        backend_url=flags.backend_url.rstrip("/"),
        reuse=flags.reuse,
        disk_budget_bytes=int(flags.disk_budget_gb * GB),
        queue_count_max=flags.queue_count_max,
        running_count_max=flags.running_count_max,
        log_level=flags.log_level,
        client_key=environment.get(CLIENT_KEY_VARIABLE, ""),
    )
