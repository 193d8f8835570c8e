"""Configuration of the proxy: its flags and one environment variable, checked by the settings table."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from warmline_common.process.arguments import GB, MB
from warmline_common.process.loopback import is_loopback
from warmline_common.settings.flags import FlagParser, SettingError, check_setting
from warmline_common.settings.models import ModelConfig, parse_models
from warmline_common.settings.parsers import make_integer_parser, split_names
from warmline_common.settings.prewarm import PrewarmEntry, check_prewarm_models, parse_prewarm
from warmline_common.settings.table import SETTINGS, get_default
from warmline_common.storage.home import Home

BACKEND_URL = "http://127.0.0.1:8025"
CLIENT_KEY_ENV_VAR = SETTINGS["client_key"].variable
ANY_ADDRESS = "0.0.0.0"
PARSERS = {"port": make_integer_parser(0, 65_535)}  # 0: any free port


class ProxyConfigError(ValueError):
    """A setting that can't be served; the message is one line for people."""


@dataclass(frozen=True)
class ProxyConfig:
    """Settings of one proxy, under their names in the table.  Raises ProxyConfigError for a bad value."""

    home: Home
    host: str = get_default("host")
    port: int = get_default("port")  # 0: any free port, announced in run/proxy.json
    backend_url: str = BACKEND_URL  # with several models, the keeper's
    models: str = get_default("models")
    model_stay_s: float = get_default("model_stay_s")
    reuse: str = get_default("reuse")
    audit_fraction: float = get_default("audit_fraction")
    audit_quiet_s: float = get_default("audit_quiet_s")
    audit_tolerance: float = get_default("audit_tolerance")
    garbage_guard: str = get_default("garbage_guard")
    disk_budget_gb: float = get_default("disk_budget_gb")
    responses_keep_days: float = get_default("responses_keep_days")
    responses_keep_mb: float = get_default("responses_keep_mb")
    queue_count_max: int = get_default("queue_count_max")
    running_count_max: int = get_default("running_count_max")
    log_level: str = get_default("log_level")
    log_format: str = get_default("log_format")
    log_files: bool = get_default("log_files")
    client_key: str = get_default("client_key")
    lan: bool = get_default("lan")
    allowed_hosts: str = get_default("allowed_hosts")
    share_cache: bool = get_default("share_cache")
    admin_needs_key: bool = get_default("admin_needs_key")
    cors_origins: str = get_default("cors_origins")
    stabilize: str = get_default("stabilize")
    prewarm: str = get_default("prewarm")
    # Deadlines; 0: none.  A request may shorten or lengthen its own by header.
    connect_timeout_s: float = get_default("connect_timeout_s")
    queue_timeout_s: float = get_default("queue_timeout_s")
    stall_timeout_s: float = get_default("stall_timeout_s")
    total_timeout_s: float = get_default("total_timeout_s")
    wedge_timeout_s: float = get_default("wedge_timeout_s")
    receive_timeout_s: float = get_default("receive_timeout_s")
    send_timeout_s: float = get_default("send_timeout_s")
    heartbeat_after_s: float = get_default("heartbeat_after_s")
    on_disconnect: str = get_default("on_disconnect")
    titles: str = get_default("titles")
    partial_save_tokens: int = get_default("partial_save_tokens")
    drain_timeout_s: float = get_default("drain_timeout_s")
    connections_max: int = get_default("connections_max")
    body_budget_mb: int = get_default("body_budget_mb")

    def __post_init__(self) -> None:
        try:
            for name in {field.name for field in fields(self)} - {"home", "backend_url"}:
                check_setting(name, getattr(self, name), PARSERS)
        except SettingError as error:
            raise ProxyConfigError(str(error)) from None
        try:
            parse_models(self.models)
        except ValueError as error:
            raise ProxyConfigError(f"{SETTINGS['models'].flag}: {error}") from None
        try:
            check_prewarm_models(self.prewarm_entries, self.model_configs)
        except ValueError as error:
            raise ProxyConfigError(f"{SETTINGS['prewarm'].flag}: {error}") from None
        backend = urlsplit(self.backend_url)
        if backend.scheme != "http" or not backend.hostname:
            raise ProxyConfigError(f"--backend-url {self.backend_url}: expected an address such as {BACKEND_URL}")

    @property
    def model_configs(self) -> list[ModelConfig]:
        """Configured models, the default first; none: one model, whatever the backend serves."""
        return parse_models(self.models)

    @property
    def prewarm_entries(self) -> list[PrewarmEntry]:
        """Configured prompts to compute ahead."""
        return parse_prewarm(self.prewarm)

    @property
    def disk_budget_bytes(self) -> int:
        return int(self.disk_budget_gb * GB)

    @property
    def body_budget_bytes(self) -> int:
        return self.body_budget_mb * MB

    @property
    def stabilize_rules(self) -> tuple[str, ...]:
        return tuple(filter(None, self.stabilize.split(",")))

    @property
    def keeps_titles(self) -> bool:
        return self.titles == "text"

    @property
    def bind_host(self) -> str:
        """Address to listen on.  `lan` is IPv4 alone: an IPv6 address can often be reached from anywhere."""
        return ANY_ADDRESS if self.lan and is_loopback(self.host) else self.host

    @property
    def is_open_to_network(self) -> bool:
        """Other machines may connect; `auth.principals.prepare_keys` makes sure that a key is required then."""
        return not is_loopback(self.bind_host)

    @property
    def is_admin_key_required(self) -> bool:
        """The owner's paths require the admin key on this machine too.

        A proxy that listens on loopback and has other names is behind a reverse proxy, whose clients all seem local.
        """
        return self.admin_needs_key or (not self.is_open_to_network and bool(self.allowed_host_names))

    @property
    def allowed_host_names(self) -> frozenset[str]:
        return split_names(self.allowed_hosts)

    @property
    def allowed_origins(self) -> frozenset[str]:
        return split_names(self.cors_origins)


def parse_config(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> ProxyConfig:
    """Configuration from flags.  Raises SystemExit(2) on an unknown flag, ProxyConfigError on a bad value."""
    parser = FlagParser("proxy", "Warmline's caching reverse proxy.", PARSERS)
    parser.add_argument("--backend-url", default=BACKEND_URL)
    try:
        values: dict[str, Any] = parser.parse_values(arguments)
    except SettingError as error:
        raise ProxyConfigError(str(error)) from None
    values |= {
        "home": Home(Path(values["home"])),
        "backend_url": values["backend_url"].rstrip("/"),
        "client_key": environment.get(CLIENT_KEY_ENV_VAR, ""),
    }
    return ProxyConfig(**values)
