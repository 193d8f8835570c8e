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

from warmline_common.settings.hints import format_command
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig
from warmline_common.settings.table import SETTINGS
from warmline_run.processes import CLI_MODULE, module_arguments
from warmline_run.settings.setting_flags import describe_relative_folder, format_setting_flags, is_explicit

ROLES = ("proxy", "backend")  # in the order of stopping; started in the other
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
EXIT_MARGIN_S = 30.0  # beyond the drain of running requests: to release them, and to save

# Variables by which a process finds models, libraries and its device as it does in the shell that installs.  None may
# hold a secret: a service's file is no place for it.
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
    """`role` is one of ROLES; `name` tells several pairs of one user apart, "" for the only one."""

    role: str
    name: str = ""


@dataclass(frozen=True)
class ServiceProcess:
    """`home` is absolute; `exit_timeout_s` is the time between SIGTERM and SIGKILL."""

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
    """Processes in the order of ROLES, without the variable that names their manager.  Raises ConfigurationError."""
    _check_config(config, name)
    home, flags, variables = Path(str(config["home"])), _format_service_flags(config), _make_environment(environment)
    program, exit_timeout_s = module_arguments(CLI_MODULE), math.ceil(float(config["drain_timeout_s"]) + EXIT_MARGIN_S)
    return [
        ServiceProcess(ServiceId(role, name), [*program, role, *flags], variables, home, exit_timeout_s)
        for role in ROLES
    ]


def check_name(name: str) -> None:
    """Raises ConfigurationError."""
    if name and not NAME.fullmatch(name):
        raise ConfigurationError(f"--name {name!r}: expected lower-case letters, digits and hyphens, 32 at most")


def _check_config(config: ResolvedConfig, name: str) -> None:
    check_name(name)
    if config.effective_settings["client_key"].source == SETTINGS["client_key"].variable:
        command = format_command("cachectl key add NAME", str(config["home"]))
        raise ConfigurationError(
            "the client key is in WARMLINE_CLIENT_KEY, which an agent does not see, and its file is no place for a "
            f"secret: unset the variable, and use `{command}`, or write client_key into warmline.toml in the home"
        )
    if problem := describe_relative_folder(config):
        raise ConfigurationError(problem)


def _format_service_flags(config: ResolvedConfig) -> list[str]:
    """Flags of both services alike: each reads the same configuration, and reports the same."""
    words = format_setting_flags(config)
    return words if is_explicit(config, "log_files") else [*words, SETTINGS["log_files"].flag]


def parse_arguments(arguments: Sequence[str]) -> dict[str, object]:
    """Flags of a service's command line, by the settings' names: for `resolve`.  A list where one is given again."""
    by_flag = {flag: setting for setting in SETTINGS.values() for flag in (setting.flag, setting.off_flag)}
    flags: dict[str, object] = {}
    words = iter(arguments)
    for word in words:
        if setting := by_flag.get(word):
            value: object = (word == setting.flag) if setting.is_switch else next(words, "")
            if setting.name == "model" and (earlier := flags.get("model")):
                value = [*(earlier if isinstance(earlier, list) else [earlier]), value]
            flags[setting.name] = value
    return flags


def _make_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a service, with a PATH: managers set next to nothing, and mlx needs a compiler on Linux."""
    shell_path = [folder for folder in environment.get("PATH", "").split(":") if folder.startswith("/")]
    path = ":".join(dict.fromkeys([str(Path(sys.executable).parent), *shell_path, *SYSTEM_PATH]))
    inherited = {
        name: value
        for name, value in sorted(environment.items())
        if value and (name in INHERITED_VARIABLES or name.startswith(INHERITED_PREFIX))
    }
    return {"HOME": str(Path.home()), "PATH": path, **inherited}
