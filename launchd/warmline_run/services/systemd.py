"""systemd's user manager, through systemctl --user."""

import os
import re
from pathlib import Path
from typing import ClassVar

from warmline_common.process.exit_codes import AGENT_VARIABLE, EXIT_CONFIGURATION
from warmline_common.settings.resolve import ConfigurationError
from warmline_run.services.manager import (
    COMMAND_TIMEOUT_S,
    InstalledService,
    Result,
    ServiceManager,
    ServiceManagerError,
    ServiceState,
)
from warmline_run.services.service import ServiceId, ServiceProcess

RESTART_S = 5
DESCRIPTORS = 8192
UNQUOTED_PATTERN = re.compile(r"[\w@+=:,./~-]+", re.ASCII)
WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
UNESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
PROPERTIES = "LoadState,ActiveState,SubState,MainPID,ExecMainCode,ExecMainStatus,ExecMainExitTimestampMonotonic"
EXITED = "1"  # ExecMainCode is waitid's si_code
SESSION_HINT = (
    "do you have a login session?  `sudo loginctl enable-linger $USER` makes one that lasts;"
    " where there is no systemd, as in most containers, use `warmline serve`"
)


class SystemdManager(ServiceManager):
    name: ClassVar[str] = "systemd"
    group: ClassVar[str] = "service"
    command: ClassVar[tuple[str, ...]] = ("systemctl", "--user")
    missing_hint: ClassVar[str] = "user services are systemd's; on a Mac use `warmline launchd`"
    display_name: ClassVar[str] = "user services"
    stop_margin_s: ClassVar[float] = COMMAND_TIMEOUT_S

    def label(self, service_id: ServiceId) -> str:
        return "-".join(filter(None, ("warmline", service_id.name, service_id.role))) + ".service"

    def service_file(self, service_id: ServiceId) -> Path:
        configuration = os.environ.get("XDG_CONFIG_HOME", "")
        folder = Path(configuration) if configuration.startswith("/") else Path.home() / ".config"
        return folder / "systemd" / "user" / self.label(service_id)

    def render_file(self, process: ServiceProcess) -> str:
        if not str(process.home).isprintable():
            raise ConfigurationError(f"--home {str(process.home)!r}: a unit can't name a folder with such characters")
        pair_name = f" ({process.service_id.name})" if process.service_id.name else ""
        environment = {**process.environment, AGENT_VARIABLE: self.name}
        lines = [
            "[Unit]",
            f"Description=Warmline {process.service_id.role}{pair_name}",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join(_quote_word(word).replace('$', '$$') for word in process.arguments)}",
            *(f"Environment={_quote_word(f'{name}={value}')}" for name, value in environment.items()),
            f"WorkingDirectory={_escape_path(process.home)}",
            "Restart=on-failure",
            f"RestartSec={RESTART_S}",
            f"RestartPreventExitStatus={EXIT_CONFIGURATION}",
            f"TimeoutStopSec={process.exit_timeout_s}",
            "KillMode=mixed",  # SIGTERM to the process alone: it stops its children itself
            f"LimitNOFILE={DESCRIPTORS}",
            "UMask=0077",
            f"StandardOutput=append:{_escape_path(process.output)}",
            f"StandardError=append:{_escape_path(process.output)}",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
        return "\n".join(lines)

    def parse_file(self, data: bytes) -> InstalledService:
        lines = [line.partition("=") for line in data.decode().splitlines()]
        values = {name: value for name, _, value in lines}
        try:
            pairs = [_split_words(value)[0].partition("=") for name, _, value in lines if name == "Environment"]
            return InstalledService(
                arguments=[word.replace("$$", "$") for word in _split_words(values["ExecStart"])],
                environment={name: value for name, _, value in pairs},
                exit_timeout_s=int(values["TimeoutStopSec"]),
            )
        except (KeyError, IndexError) as error:
            raise ValueError(f"not a unit of Warmline: {error!r}") from None

    def read_state(self, service_id: ServiceId) -> ServiceState:
        arguments = ("show", f"--property={PROPERTIES}", self.label(service_id))
        result = self.run_tool(*arguments)
        if result.returncode:
            raise self.make_error(arguments, result)
        return parse_state(result.stdout)

    def reload(self) -> None:
        self.run_checked("daemon-reload")

    def start(self, service_id: ServiceId) -> None:
        self.reload()
        self.run_checked("enable", self.label(service_id))
        self.restart(service_id)

    def stop(self, service_id: ServiceId) -> None:
        words = ("disable", "--now") if self.is_installed(service_id) else ("stop",)
        self.run_checked(*words, self.label(service_id), timeout_s=self.stop_timeout_s(service_id))

    def restart(self, service_id: ServiceId) -> None:
        self.run_checked("restart", self.label(service_id), timeout_s=self.stop_timeout_s(service_id))

    def make_error(self, arguments: tuple[str, ...], result: Result) -> ServiceManagerError:
        return self.format_error(arguments, result, SESSION_HINT if arguments[0] in ("daemon-reload", "show") else "")


def _quote_word(word: str) -> str:
    """One word of a unit's line, in which % introduces a specifier."""
    escaped = "".join(ESCAPES.get(character, character) for character in word).replace("%", "%%")
    return escaped if UNQUOTED_PATTERN.fullmatch(word) else f'"{escaped}"'


def _escape_path(path: Path) -> str:
    """These lines have no quotes: all up to their end is the path."""
    return str(path).replace("%", "%%")


def _split_words(line: str) -> list[str]:
    return [_unescape_word(quoted if quoted or not bare else bare) for quoted, bare in WORD.findall(line)]


def _unescape_word(word: str) -> str:
    return re.sub(r"\\(.)", lambda match: UNESCAPES.get(match[1], match[1]), word).replace("%%", "%")


def parse_state(output: str) -> ServiceState:
    """State in the output of `systemctl show`."""
    values = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    pid = int(values.get("MainPID", "0") or 0)
    return ServiceState(values.get("LoadState") == "loaded", pid or None, "" if pid else _describe_exit(values))


def _describe_exit(values: dict[str, str]) -> str:
    if values.get("ExecMainExitTimestampMonotonic", "0") in ("", "0"):
        return ""
    status = values.get("ExecMainStatus", "")
    return f"exit code {status}" if values.get("ExecMainCode") == EXITED else f"killed by signal {status}"
