"""Command lines and environments of the processes, and the demo model's preparation."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.process.keeper_pipes.standby import STANDBY_FLAG
from warmline_common.process.parent_watch import PARENT_PIPE
from warmline_common.settings.resolve import ResolvedConfig
from warmline_common.settings.table import DEMO_MODEL, DEMO_NAME, SETTINGS, format_flags
from warmline_run import openblas
from warmline_run.settings.setting_flags import format_setting_flags

CLI_MODULE, BACKEND_MODULE = "warmline_run.cli", "warmline_backend"
KEEPER_MARGIN_S = 20.0  # beyond its backends' drain: their own margin, and what it does after them
KEEPER_HURRY_S = 5.0  # to kill its backends
CLIENT_KEY = SETTINGS["client_key"].variable


@dataclass(frozen=True)
class Command:
    """Command line and environment of a process.

    `drain_timeout_s`: for its running requests when it is stopped; `hurry_s`: to end after a second SIGTERM, before it
    is killed; 0: a SIGKILL takes that one's place.
    """

    name: str
    arguments: list[str]
    environment: Mapping[str, str]
    drain_timeout_s: float
    hurry_s: float = 0.0


def module_arguments(name: str) -> list[str]:
    """-P: the current directory must not shadow an installed package."""
    return [sys.executable, "-P", "-m", name]


def backend_command(config: ResolvedConfig, model: str, environment: Mapping[str, str]) -> Command:
    """`model` is the setting, or the demo model's folder."""
    served = str(config["served_name"]) or (DEMO_NAME if config["model"] == DEMO_MODEL else "")
    arguments = [
        *module_arguments(BACKEND_MODULE),
        *("--model", model),
        *(("--served-name", served) if served else ()),
        *("--host", "127.0.0.1"),
        *("--port", str(config["backend_port"])),
        *format_flags("backend", config.__getitem__),
    ]
    return Command("backend", arguments, _make_variables(environment), float(config["drain_timeout_s"]))


def _make_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a backend."""
    variables = {name: value for name, value in environment.items() if name != CLIENT_KEY}
    preload, _ = openblas.choose_preload(variables.get("LD_PRELOAD", ""))
    if preload:
        variables["LD_PRELOAD"] = preload
        variables.setdefault("OPENBLAS_THREAD_TIMEOUT", openblas.THREAD_TIMEOUT)
    return variables


class StartMemory(NamedTuple):
    """Memory that the backend of one of several models begins with."""

    limit_bytes: int  # of all models
    share_bytes: int  # for its KV
    usable_bytes: int  # for all that its process takes


def model_command(
    config: ResolvedConfig,
    model: str,
    environment: Mapping[str, str],
    instance: str,
    memory: StartMemory,
    warm_up_s: float = 0.0,
) -> Command:
    """Backend of one of several models, by its configuration (see `make_model_config`).

    `warm_up_s`: at most so long, 0.0: as long as a backend chooses.
    """
    command = backend_command(config, model, environment)
    own = ["--instance", instance, "--memory-limit-bytes", str(memory.limit_bytes)]
    own += ["--memory-share-bytes", str(memory.share_bytes), "--memory-usable-bytes", str(memory.usable_bytes)]
    own += ["--warm-up-s", f"{warm_up_s:g}"] if warm_up_s else []
    port_at = command.arguments.index("--port") + 1
    arguments = [*command.arguments[:port_at], "0", *command.arguments[port_at + 1 :], *own]
    return replace(command, name=f"backend of {config['served_name']}", arguments=arguments)


def list_backend_flags(command: Command) -> list[str]:
    """Flags of a backend's command line."""
    return command.arguments[len(module_arguments(BACKEND_MODULE)) :]


def make_standby_command(environment: Mapping[str, str]) -> Command:
    """Process that becomes a backend once it is given its flags."""
    return Command("standby", [*module_arguments(BACKEND_MODULE), STANDBY_FLAG], _make_variables(environment), 0.0)


def keeper_command(config: ResolvedConfig, environment: Mapping[str, str]) -> Command:
    """Keeper of several models, in place of the backend."""
    arguments = [
        *module_arguments(CLI_MODULE),
        "backend",
        *format_setting_flags(config, left_out=("host", "lan")),
        *(SETTINGS["host"].flag, "127.0.0.1"),  # another host needs a client key, and that is the proxy's alone
    ]
    variables = {name: value for name, value in environment.items() if name != CLIENT_KEY}
    return Command("keeper", arguments, variables, float(config["drain_timeout_s"]) + KEEPER_MARGIN_S, KEEPER_HURRY_S)


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


def demo_arguments(config: ResolvedConfig) -> list[str]:
    """Command line that prepares the demo model and prints its folder."""
    return [*module_arguments("warmline_backend.demo"), "--home", str(config["home"])]


def prepare_model(config: ResolvedConfig) -> str:
    """The model's folder or name; prepares the demo model where the settings name that.

    The preparation prints on stderr its writes, and the reason of a failure: then raises SystemExit.
    """
    if config["model"] != DEMO_MODEL:
        return str(config["model"])
    environment = {name: value for name, value in os.environ.items() if name != PARENT_PIPE}  # it is not passed on
    done = subprocess.run(demo_arguments(config), env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(EXIT_CONFIGURATION)
    return done.stdout.strip()
