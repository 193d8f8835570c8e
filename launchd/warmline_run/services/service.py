"""Services: one process of the pair as launchd or systemd runs it.  Pure, except for checks of folders.

A service runs `warmline proxy` or `warmline backend` by the absolute path of this Python, with the settings that
flags or variables gave at the installation as flags.  HOME/warmline.toml is read at each start.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warmline_common.settings.parsers import Value
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig
from warmline_common.settings.table import DEMO_MODEL, SETTINGS
from warmline_run import processes as commands

ROLES = ("proxy", "backend")  # in the order of stopping; started in the other
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
EXIT_MARGIN_S = 30.0  # beyond what running requests get: to let go of them, and to write what is kept
FOLDER_SETTINGS = ("model", "adapter_path")
CLI_MODULE = "warmline_run.cli"

# What a process may need to find models, libraries and its device as it does in the shell that installs.  No variable
# that may hold a secret: an agent's file is none.
INHERITED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTHONPATH",
    "XDG_CACHE_HOME",
)
INHERITED_PREFIX = "MLX_"
SYSTEM_PATH = ("/opt/homebrew/bin", "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")


@dataclass(frozen=True)
class ServiceId:
    """Names an agent: `role` is one of ROLES; `name` tells several pairs of one user apart, "" for the only one."""

    role: str
    name: str = ""


@dataclass(frozen=True)
class ServiceProcess:
    """`home` is absolute; `exit_timeout_s` is what the process gets between SIGTERM and SIGKILL."""

    service_id: ServiceId
    arguments: list[str]
    environment: dict[str, str]
    home: Path
    exit_timeout_s: int

    @property
    def output(self) -> Path:
        """File of stdout and stderr: errors that end a start, and crashes.  Other lines are in the process log."""
        return output_file(self.home, self.service_id.role)


def log_file(home: Path, role: str) -> Path:
    """Log that the process itself writes and rotates."""
    return home / "logs" / f"{role}.log"


def output_file(home: Path, role: str) -> Path:
    return home / "logs" / f"{role}.stderr"


def make_processes(config: ResolvedConfig, environment: Mapping[str, str], name: str = "") -> list[ServiceProcess]:
    """The agents in the order of ROLES, without the variable that names their keeper.  Raises ConfigurationError."""
    _check_config(config, name)
    home = Path(str(config["home"]))
    flags = _format_flags(config)
    own = _make_environment(environment)
    exit_timeout_s = math.ceil(float(config["drain_timeout_s"]) + EXIT_MARGIN_S)
    return [
        ServiceProcess(
            ServiceId(role, name), [*commands.module_arguments(CLI_MODULE), role, *flags], own, home, exit_timeout_s
        )
        for role in ROLES
    ]


def check_name(name: str) -> None:
    """Raises ConfigurationError."""
    if name and not NAME.fullmatch(name):
        raise ConfigurationError(f"--name {name!r}: expected lower-case letters, digits and hyphens, 32 at most")


def _check_config(config: ResolvedConfig, name: str) -> None:
    check_name(name)
    if config.effective_settings["client_key"].source == SETTINGS["client_key"].variable:
        raise ConfigurationError(
            "the client key is in WARMLINE_CLIENT_KEY, which an agent does not see, and its file is no place for a "
            "secret: unset the variable, and use `cachectl key add`, or write client_key into warmline.toml in the home"
        )
    for setting in FOLDER_SETTINGS:
        value, source = str(config[setting]), config.effective_settings[setting].source
        if not _is_explicit(config, setting) and _is_relative_folder(value):
            raise ConfigurationError(
                f"{setting} (from {source}): {value} depends on the current folder; write it whole"
            )


def _is_explicit(config: ResolvedConfig, name: str) -> bool:
    """By a flag or a variable, and not by the file, which agents read themselves."""
    return config.effective_settings[name].source in (SETTINGS[name].flag, SETTINGS[name].variable)


def _is_relative_folder(value: str) -> bool:
    return value not in ("", DEMO_MODEL) and not Path(value).is_absolute() and Path(value).is_dir()


def _format_flags(config: ResolvedConfig) -> list[str]:
    """Both agents get all: each then reads the same configuration, and tells the same of it."""
    words = [SETTINGS["home"].flag, str(config["home"])]
    for name in SETTINGS:
        if name != "home" and _is_explicit(config, name):
            words += _format_flag(name, _make_absolute(name, config[name]))
    return words if _is_explicit(config, "log_files") else [*words, SETTINGS["log_files"].flag]


def _make_absolute(name: str, value: Value) -> Value:
    """Agents start in another folder."""
    return str(Path(str(value)).absolute()) if name in FOLDER_SETTINGS and _is_relative_folder(str(value)) else value


def _format_flag(name: str, value: Value) -> list[str]:
    setting = SETTINGS[name]
    if isinstance(value, bool):
        return [setting.flag if value else setting.off_flag]
    return [setting.flag, str(value)]


def parse_arguments(arguments: Sequence[str]) -> dict[str, object]:
    """Flags of a service's command line, by the settings' names: for `resolve`."""
    by_flag = {setting.flag: setting for setting in SETTINGS.values()}
    off = {setting.off_flag: setting for setting in SETTINGS.values() if isinstance(setting.default, bool)}
    given: dict[str, object] = {}
    words = iter(arguments)
    for word in words:
        if word in off:
            given[off[word].name] = False
        elif word in by_flag:
            setting = by_flag[word]
            given[setting.name] = True if isinstance(setting.default, bool) else next(words, "")
    return given


def _make_environment(environment: Mapping[str, str]) -> dict[str, str]:
    passed_on = {
        name: value
        for name, value in sorted(environment.items())
        if value and (name in INHERITED_VARIABLES or name.startswith(INHERITED_PREFIX))
    }
    return {"HOME": str(Path.home()), "PATH": _make_path(environment.get("PATH", "")), **passed_on}


def _make_path(path: str) -> str:
    """PATH for a service: managers set next to nothing, and mlx needs a compiler on Linux."""
    shells = [folder for folder in path.split(":") if folder.startswith("/")]
    return ":".join(dict.fromkeys([str(Path(sys.executable).parent), *shells, *SYSTEM_PATH]))
