"""The command lines and environments of the two processes, and the step before: the demo model."""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.settings.resolve import ResolvedConfig
from warmline_common.settings.table import DEMO_MODEL, SETTINGS, format_flags
from warmline_run import openblas

DEMO_NAME = "smollm2-135m-instruct"
CLIENT_KEY = SETTINGS["client_key"].variable


@dataclass(frozen=True)
class Command:
    """A process of the pair: what to execute, and how long it goes on with what it has when it is told to stop."""

    name: str
    arguments: list[str]
    environment: Mapping[str, str]
    drain_timeout_s: float


def module_arguments(name: str) -> list[str]:
    """-P: the current directory must not shadow an installed package."""
    return [sys.executable, "-P", "-m", name]


def backend_command(config: ResolvedConfig, model: str, environment: Mapping[str, str]) -> Command:
    """`model` is what to load: the setting, or the demo model's folder."""
    served = str(config["served_name"]) or (DEMO_NAME if config["model"] == DEMO_MODEL else "")
    arguments = [
        *module_arguments("warmline_backend"),
        *("--model", model),
        *(("--served-name", served) if served else ()),
        *("--host", "127.0.0.1"),
        *("--port", str(config["backend_port"])),
        *format_flags("backend", config.__getitem__),
    ]
    own = {name: value for name, value in environment.items() if name != CLIENT_KEY}
    preload, _ = openblas.choose_preload(own.get("LD_PRELOAD", ""))
    if preload:
        own["LD_PRELOAD"] = preload
        own.setdefault("OPENBLAS_THREAD_TIMEOUT", openblas.THREAD_TIMEOUT)
    return Command("backend", arguments, own, float(config["drain_timeout_s"]))


def proxy_command(config: ResolvedConfig, environment: Mapping[str, str]) -> Command:
    arguments = [
        *module_arguments("warmline_proxy"),
        *("--backend-url", f"http://127.0.0.1:{config['backend_port']}"),
        *format_flags("proxy", config.__getitem__),
    ]
    own = {name: value for name, value in environment.items() if name != CLIENT_KEY}
    if config["client_key"]:
        own[CLIENT_KEY] = str(config["client_key"])  # never on a command line, which all users of a machine can read
    return Command("proxy", arguments, own, float(config["drain_timeout_s"]))


def doctor_command(
    config: ResolvedConfig, model: str, options: Iterable[str], environment: Mapping[str, str]
) -> Command:
    """`options` are the command's own.  A home that the command line does not name is in force anyway."""
    arguments = [
        *module_arguments("warmline_backend.doctor"),
        *("--called", str(config["model"])),
        *(("--home", str(config["home"])) if config.effective_settings["home"].source == SETTINGS["home"].flag else ()),
        *format_flags("doctor", config.__getitem__),
        *options,
        *("--", model),
    ]
    return Command("doctor", arguments, environment, 0.0)


def prepare_model(config: ResolvedConfig) -> str:
    """The model's folder or name; prepares the demo model where that is asked for.

    Its preparation says on stderr what it is about to write, and why it can't: then raises SystemExit.
    """
    if config["model"] != DEMO_MODEL:
        return str(config["model"])
    command = [*module_arguments("warmline_backend.demo"), "--home", str(config["home"])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(EXIT_CONFIGURATION)
    return done.stdout.strip()
