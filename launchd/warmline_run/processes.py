"""Command lines and environments of the processes, and the demo model's preparation."""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig
from warmline_common.settings.table import DEMO_MODEL, SETTINGS, format_flags
from warmline_run import openblas

DEMO_NAME = "smollm2-135m-instruct"
NAME_CHARS_MAX = 200
NEAR_COUNT_MAX = 3
CLIENT_KEY = SETTINGS["client_key"].variable


@dataclass(frozen=True)
class Command:
    """Command line and environment of a process; `drain_timeout_s`: for its running requests when it is stopped."""

    name: str
    arguments: list[str]
    environment: Mapping[str, str]
    drain_timeout_s: float


def module_arguments(name: str) -> list[str]:
    """-P: the current directory must not shadow an installed package."""
    return [sys.executable, "-P", "-m", name]


def backend_command(config: ResolvedConfig, model: str, environment: Mapping[str, str]) -> Command:
    """`model` is the setting, or the demo model's folder."""
    served = str(config["served_name"]) or (DEMO_NAME if config["model"] == DEMO_MODEL else "")
    arguments = [
        *module_arguments("warmline_backend"),
        *("--model", model),
        *(("--served-name", served) if served else ()),
        *("--host", "127.0.0.1"),
        *("--port", str(config["backend_port"])),
        *format_flags("backend", config.__getitem__),
    ]
    variables = {name: value for name, value in environment.items() if name != CLIENT_KEY}
    preload, _ = openblas.choose_preload(variables.get("LD_PRELOAD", ""))
    if preload:
        variables["LD_PRELOAD"] = preload
        variables.setdefault("OPENBLAS_THREAD_TIMEOUT", openblas.THREAD_TIMEOUT)
    return Command("backend", arguments, variables, float(config["drain_timeout_s"]))


def proxy_command(config: ResolvedConfig, environment: Mapping[str, str]) -> Command:
    arguments = [
        *module_arguments("warmline_proxy"),
        *("--backend-url", f"http://127.0.0.1:{config['backend_port']}"),
        *format_flags("proxy", config.__getitem__),
    ]
    variables = {name: value for name, value in environment.items() if name != CLIENT_KEY}
    if config["client_key"]:
        variables[CLIENT_KEY] = str(config["client_key"])  # no flag: all users of a machine can read command lines
    return Command("proxy", arguments, variables, float(config["drain_timeout_s"]))


def doctor_command(
    config: ResolvedConfig, model: str, options: Iterable[str], environment: Mapping[str, str]
) -> Command:
    """`options` are the doctor's own.  A home that no flag names is in force anyway."""
    arguments = [
        *module_arguments("warmline_backend.doctor"),
        *("--called", str(config["model"])),
        *(("--home", str(config["home"])) if config.effective_settings["home"].source == SETTINGS["home"].flag else ()),
        *format_flags("doctor", config.__getitem__),
        *options,
        *("--", model),
    ]
    return Command("doctor", arguments, environment, 0.0)


def check_model_folder(config: ResolvedConfig) -> None:
    """Raise ConfigurationError for a model that is no model's folder and can't be a repository's name either.

    The backend checks more, once it runs; this is found before anything is started.
    """
    setting = config.effective_settings["model"]
    name = str(setting.value)
    path, called = Path(name), f"{setting.source} {name[:NAME_CHARS_MAX]}"
    with suppress(OSError):  # a name that can't be a path's: the backend says why
        if name == DEMO_MODEL or (path / "config.json").is_file():
            return
        if path.exists():
            raise ConfigurationError(f"{called}: not a model's folder, it has no config.json")
        if name.startswith((".", "/")) or name.count("/") != 1:
            raise ConfigurationError(f"{called}: there is no such folder; {_suggest_folders(path)}")


def _suggest_folders(path: Path) -> str:
    folders = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    near = [str(path.with_name(each)) for each in get_close_matches(path.name, folders, NEAR_COUNT_MAX)]
    return f"near it: {', '.join(near)}" if near else "give a model's folder, or a repository's name as owner/model"


def prepare_model(config: ResolvedConfig) -> str:
    """The model's folder or name; prepares the demo model where the settings name that.

    The preparation prints on stderr its writes, and the reason of a failure: then raises SystemExit.
    """
    if config["model"] != DEMO_MODEL:
        return str(config["model"])
    command = [*module_arguments("warmline_backend.demo"), "--home", str(config["home"])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(EXIT_CONFIGURATION)
    return done.stdout.strip()
