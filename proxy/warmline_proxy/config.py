"""The proxy's configuration: flags and one environment variable, parsed and validated once."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from warmline_common.process.arguments import GB, gigabytes
from warmline_common.process.console import write_line
from warmline_common.process.loopback import is_loopback
from warmline_common.storage.home import Home
from warmline_proxy.explain.stabilize import RULES
from warmline_proxy.http.cors import parse_origins
from warmline_proxy.http.host_filter import parse_host_names

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
CLIENT_KEY_ENV_VAR = "WARMLINE_CLIENT_KEY"
ANY_ADDRESS = "0.0.0.0"

REUSE_MODES = ("fast", "exact", "off")
GARBAGE_GUARD_MODES = ("off", "observe")
ON_DISCONNECT_MODES = ("stop", "finish-prefill")
DURATION_SETTINGS = (
    "connect_timeout_s",
    "queue_timeout_s",
    "stall_timeout_s",
    "total_timeout_s",
    "wedge_timeout_s",
    "receive_timeout_s",
    "send_timeout_s",
    "heartbeat_after_s",
    "drain_timeout_s",
)
POSITIVE_DURATION_SETTINGS = ("wedge_timeout_s", "receive_timeout_s", "send_timeout_s")


class ProxyConfigError(ValueError):
    """A setting that can't be served; the message is one line for people."""


@dataclass(frozen=True)
class ProxyConfig:
    """What one proxy was told.  Raises ConfigError where the settings contradict each other."""

    home: Home
    host: str = "127.0.0.1"
    port: int = 8026  # 0: any free port, told in run/proxy.json
    backend_url: str = "http://127.0.0.1:8025"
    reuse: str = "fast"  # one of REUSE
    audit_fraction: float = 0.01  # of the warm requests; each is computed again, cold, when the engine is idle
    audit_tolerance: float = 0.0  # in nats; 0: as the KV's type allows
    garbage_guard: str = "observe"  # or "off"
    disk_budget_bytes: int = 50 * GB
    queue_count_max: int = 64
    running_count_max: int = 16
    log_level: str = "info"
    log_format: str = "text"  # or "json"
    log_files: bool = False  # into HOME/logs, rotated, instead of stderr
    client_key: str = ""
    lan: bool = False  # other machines may connect; a client key is made where there is none
    allowed_hosts: str = ""  # separated by commas, or "*": further names that Host may have
    share_cache: bool = False  # all client keys are one tenant
    admin_needs_key: bool = False  # for the owner's paths it is not enough to be on this machine
    cors_origins: str = ""  # separated by commas, or "*": of the web pages that may read answers
    stabilize: str = ""  # of hygiene.stabilize.RULES, separated by commas: what is evened out at the top of prompts
    # Deadlines; 0: none.  A request may shorten or lengthen its own by header.
    connect_timeout_s: float = 60.0  # how long a request waits for a backend that starts, or is started again
    queue_timeout_s: float = 0.0
    stall_timeout_s: float = 300.0  # without a chunk or a token
    total_timeout_s: float = 0.0
    wedge_timeout_s: float = 120.0  # how long a step may take before the backend is killed
    receive_timeout_s: float = 60.0  # for the next piece of a request
    send_timeout_s: float = 300.0  # for a client to take the next piece of its answer
    heartbeat_after_s: float = 0.0  # after which a client that waits for JSON gets whitespace
    on_disconnect: str = "stop"  # or "finish-prefill"
    partial_save_tokens: int = 8192  # a running prefill is saved every so many tokens; 0: only at its end
    drain_timeout_s: float = 30.0  # what running requests get at a shutdown
    connections_max: int = 2048

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ProxyConfigError(f"--port {self.port}: expected a number from 0 to 65535")
        backend = urlsplit(self.backend_url)
        if backend.scheme != "http" or not backend.hostname:
            raise ProxyConfigError(
                f"--backend-url {self.backend_url}: expected an address such as http://127.0.0.1:8025"
            )
        if self.disk_budget_bytes < 0:
            raise ProxyConfigError("--disk-budget-gb: expected 0 or more")
        if self.queue_count_max < 0 or self.running_count_max < 1:
            raise ProxyConfigError("--queue-count-max must be at least 0 and --running-count-max at least 1")
        if not 0 <= self.audit_fraction <= 1:
            raise ProxyConfigError(f"--audit-fraction {self.audit_fraction}: expected a share, from 0 to 1")
        if not 0 <= self.audit_tolerance < float("inf"):
            raise ProxyConfigError(
                f"--audit-tolerance {self.audit_tolerance}: expected a difference in nats, 0 or more"
            )
        if self.on_disconnect not in ON_DISCONNECT_MODES:
            raise ProxyConfigError(f"--on-disconnect {self.on_disconnect}: expected {' or '.join(ON_DISCONNECT_MODES)}")
        if unknown := set(self.stabilize_rules) - set(RULES):
            raise ProxyConfigError(f"--stabilize {', '.join(sorted(unknown))}: expected some of {', '.join(RULES)}")
        if self.client_key != self.client_key.strip() or not self.client_key.isprintable():
            raise ProxyConfigError(f"{CLIENT_KEY_ENV_VAR}: expected printable characters, and no spaces at the ends")
        try:
            parse_origins(self.cors_origins)
        except ValueError as error:
            raise ProxyConfigError(f"--cors-origins {error}") from None
        try:
            parse_host_names(self.allowed_hosts)
        except ValueError as error:
            raise ProxyConfigError(f"--allowed-hosts {error}") from None
        for name in DURATION_SETTINGS:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ProxyConfigError(
                    f"{_flag_name(name)} {getattr(self, name)}: expected a number of seconds, 0 or more"
                )
        for name in POSITIVE_DURATION_SETTINGS:
            if not getattr(self, name):
                raise ProxyConfigError(f"{_flag_name(name)} 0: expected more than 0")
        if self.partial_save_tokens < 0 or self.connections_max < 1:
            raise ProxyConfigError("--partial-save-tokens must be at least 0 and --connections-max at least 1")

    @property
    def stabilize_rules(self) -> tuple[str, ...]:
        return tuple(filter(None, self.stabilize.split(",")))

    @property
    def bind_host(self) -> str:
        """Where to listen.  `lan` is IPv4 alone: an IPv6 address can often be reached from anywhere."""
        return ANY_ADDRESS if self.lan and is_loopback(self.host) else self.host

    @property
    def is_open_to_network(self) -> bool:
        """Whether other machines may connect; `client_keys.prepare_keys` sees to it that a key is asked for then."""
        return not is_loopback(self.bind_host)

    @property
    def is_admin_key_required(self) -> bool:
        """Whether to be on this machine is not enough: who listens on loopback and has other names is behind a proxy on
        this machine, through which the whole world comes from here.
        """
        return self.admin_needs_key or (not self.is_open_to_network and bool(self.allowed_host_names))

    @property
    def allowed_host_names(self) -> frozenset[str]:
        return parse_host_names(self.allowed_hosts)

    @property
    def allowed_origins(self) -> frozenset[str]:
        return parse_origins(self.cors_origins)


class _ArgumentParser(argparse.ArgumentParser):
    """argparse, but bad flags cost one line instead of a page."""

    def error(self, message: str) -> NoReturn:
        write_line(f"warmline proxy: {message}")
        raise SystemExit(2)


def _build_parser() -> argparse.ArgumentParser:
    parser = _ArgumentParser(prog="python -m warmline_proxy", description="Warmline's caching reverse proxy.")
    parser.add_argument("--home", type=Path, default=Path("~/.warmline"), help="where index and segments live")
    parser.add_argument("--host", default=ProxyConfig.host)
    parser.add_argument("--port", type=int, default=ProxyConfig.port)
    parser.add_argument("--backend-url", default=ProxyConfig.backend_url)
    parser.add_argument("--reuse", choices=REUSE_MODES, default=ProxyConfig.reuse)
    parser.add_argument("--audit-fraction", type=float, default=ProxyConfig.audit_fraction)
    parser.add_argument("--audit-tolerance", type=float, default=ProxyConfig.audit_tolerance)
    parser.add_argument("--garbage-guard", choices=GARBAGE_GUARD_MODES, default=ProxyConfig.garbage_guard)
    parser.add_argument("--disk-budget-gb", type=gigabytes, default=ProxyConfig.disk_budget_bytes / GB)
    parser.add_argument("--queue-count-max", type=int, default=ProxyConfig.queue_count_max)
    parser.add_argument("--running-count-max", type=int, default=ProxyConfig.running_count_max)
    parser.add_argument("--on-disconnect", choices=ON_DISCONNECT_MODES, default=ProxyConfig.on_disconnect)
    parser.add_argument("--partial-save-tokens", type=int, default=ProxyConfig.partial_save_tokens)
    parser.add_argument("--connections-max", type=int, default=ProxyConfig.connections_max)
    parser.add_argument("--cors-origins", default="")
    parser.add_argument("--stabilize", default="")
    for name in DURATION_SETTINGS:
        parser.add_argument(_flag_name(name), type=float, default=getattr(ProxyConfig, name))
    parser.add_argument("--log-level", choices=LOG_LEVELS, default=ProxyConfig.log_level)
    parser.add_argument("--log-format", choices=LOG_FORMATS, default=ProxyConfig.log_format)
    parser.add_argument("--log-files", action="store_true")
    parser.add_argument("--lan", action="store_true")
    parser.add_argument("--allowed-hosts", default="")
    parser.add_argument("--share-cache", action="store_true")
    parser.add_argument("--admin-needs-key", action="store_true")
    return parser


def _flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def parse_config(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> ProxyConfig:
    """Flags to a Config.  Raises SystemExit(2) on a bad flag, ConfigError on bad values."""
    flags = _build_parser().parse_args(arguments)
    return ProxyConfig(
        home=Home(flags.home.expanduser().absolute()),
        host=flags.host,
        port=flags.port,
        backend_url=flags.backend_url.rstrip("/"),
        reuse=flags.reuse,
        audit_fraction=flags.audit_fraction,
        audit_tolerance=flags.audit_tolerance,
        garbage_guard=flags.garbage_guard,
        disk_budget_bytes=int(flags.disk_budget_gb * GB),
        queue_count_max=flags.queue_count_max,
        running_count_max=flags.running_count_max,
        on_disconnect=flags.on_disconnect,
        partial_save_tokens=flags.partial_save_tokens,
        connections_max=flags.connections_max,
        cors_origins=flags.cors_origins,
        stabilize=flags.stabilize,
        **{name: getattr(flags, name) for name in DURATION_SETTINGS},
        log_level=flags.log_level,
        log_format=flags.log_format,
        log_files=flags.log_files,
        lan=flags.lan,
        allowed_hosts=flags.allowed_hosts,
        share_cache=flags.share_cache,
        admin_needs_key=flags.admin_needs_key,
        client_key=environment.get(CLIENT_KEY_ENV_VAR, ""),
    )
