"""systemd's user manager, through systemctl --user."""

import os
import re
from pathlib import Path
from typing import ClassVar

from warmline_common.settings.resolve import ConfigurationError
from warmline_run.services.manager import COMMAND_TIMEOUT_S, InstalledService, ServiceManager, ServiceState
from warmline_run.services.service import ServiceId, ServiceProcess

RESTART_S = 5
DESCRIPTORS = 8192
CONFIGURATION_EXIT_CODE = 2  # the exit code that starting again does not help
UNQUOTED_PATTERN = re.compile(r"[\w@+=:,./~-]+", re.ASCII)
WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
UNESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def render_unit(process: ServiceProcess) -> bytes:
    lines = [
        "[Unit]",
        f"Description=Warmline {process.service_id.role}"
        + (f" ({process.service_id.name})" if process.service_id.name else ""),
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(_quote_word(word).replace('$', '$$') for word in process.arguments)}",
        *(f"Environment={_quote_word(f'{name}={value}')}" for name, value in process.environment.items()),
        f"WorkingDirectory={_escape_path(str(process.home))}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        f"RestartPreventExitStatus={CONFIGURATION_EXIT_CODE}",
        f"TimeoutStopSec={process.exit_timeout_s}",
        f"LimitNOFILE={DESCRIPTORS}",
        "UMask=0077",
        f"StandardOutput=append:{_escape_path(str(process.output))}",
        f"StandardError=append:{_escape_path(str(process.output))}",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    ]
    return "\n".join(lines).encode()


def _quote_word(word: str) -> str:
    """As one word of a unit's line, in which % introduces a specifier."""
    escaped = "".join(ESCAPES.get(character, character) for character in word).replace("%", "%%")
    return escaped if UNQUOTED_PATTERN.fullmatch(word) else f'"{escaped}"'


def _escape_path(path: str) -> str:
    """These lines have no quotes: all up to their end is the path."""
    return path.replace("%", "%%")


def parse_unit(data: bytes) -> InstalledService:
    """Raises ValueError for what is no unit of an agent."""
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
        raise ValueError(f"no unit of ours: {error!r}") from None


def _split_words(line: str) -> list[str]:
    return [_unescape_word(quoted if quoted or not bare else bare) for quoted, bare in WORD.findall(line)]


def _unescape_word(word: str) -> str:
    return re.sub(r"\\(.)", lambda found: UNESCAPES.get(found[1], found[1]), word).replace("%%", "%")


PROPERTIES = "LoadState,ActiveState,SubState,MainPID,ExecMainCode,ExecMainStatus,ExecMainExitTimestampMonotonic"
EXITED = "1"  # ExecMainCode is waitid's si_code
SESSION_HINT = (
    "is there a session of yours?  `sudo loginctl enable-linger $USER` makes one that lasts;"
    " where there is no systemd, as in most containers, use `warmline serve`"
)


class SystemdManager(ServiceManager):
    name: ClassVar[str] = "systemd"
    tool: ClassVar[str] = "systemctl"
    missing_hint: ClassVar[str] = "user services are systemd's; on a Mac use `warmline launchd`"
    display_name: ClassVar[str] = "user services"

    def label(self, service_id: ServiceId) -> str:
        return "-".join(filter(None, ("warmline", service_id.name, service_id.role))) + ".service"

    def service_file(self, service_id: ServiceId) -> Path:
        configuration = os.environ.get("XDG_CONFIG_HOME", "")
        folder = Path(configuration) if configuration.startswith("/") else Path.home() / ".config"
        return folder / "systemd" / "user" / self.label(service_id)

    def render_file(self, process: ServiceProcess) -> bytes:
        if not str(process.home).isprintable():
            raise ConfigurationError(f"--home {str(process.home)!r}: a unit can't name a folder with such characters")
        return render_unit(process)

    def parse_file(self, data: bytes) -> InstalledService:
        return parse_unit(data)

    def read_state(self, service_id: ServiceId) -> ServiceState:
        words = ("--user", "show", f"--property={PROPERTIES}", self.label(service_id))
        done = self.run_tool(*words)
        if done.exit_code:
            raise self.make_error(words, done, SESSION_HINT)
        return parse_state(done.output)

    def check_available(self) -> None:
        self._run_systemctl("daemon-reload")

    def start(self, service_id: ServiceId) -> None:
        self._run_systemctl("daemon-reload")
        self._run_systemctl("enable", self.label(service_id))
        self._run_systemctl("restart", self.label(service_id), timeout_s=self._stop_timeout_s(service_id))

    def stop(self, service_id: ServiceId) -> None:
        words = ("disable", "--now") if self.is_installed(service_id) else ("stop",)
        self._run_systemctl(*words, self.label(service_id), timeout_s=self._stop_timeout_s(service_id))

    def restart(self, service_id: ServiceId) -> None:
        self._run_systemctl("restart", self.label(service_id), timeout_s=self._stop_timeout_s(service_id))

    def reload(self) -> None:
        self._run_systemctl("daemon-reload")

    def _run_systemctl(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self.run_checked(
            "--user", *arguments, hint=SESSION_HINT if arguments == ("daemon-reload",) else "", timeout_s=timeout_s
        )

    def _stop_timeout_s(self, service_id: ServiceId) -> float:
        return self.exit_timeout_s(service_id) + COMMAND_TIMEOUT_S


def parse_state(output: str) -> ServiceState:
    """Of what `systemctl show` says of a unit."""
    values = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    pid = int(values.get("MainPID", "0") or 0)
    return ServiceState(values.get("LoadState") == "loaded", pid or None, "" if pid else _describe_exit(values))


def _describe_exit(values: dict[str, str]) -> str:
    if values.get("ExecMainExitTimestampMonotonic", "0") in ("", "0"):
        return ""
    status = values.get("ExecMainStatus", "")
    return f"exit code {status}" if values.get("ExecMainCode") == EXITED else f"killed by signal {status}"
