"""The command lines and environments of the two processes, and the step before: the demo model."""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from warmline_run import openblas
from warmline_run.settings.resolve import EXIT_CONFIGURATION, ResolvedConfig
from warmline_run.settings.schema import DEMO_MODEL, SETTINGS

DEMO_NAME = "smollm2-135m-instruct"
CLIENT_KEY = SETTINGS["client_key"].variable

BACKEND_SETTINGS = (
    "home",
    "reuse",
    "prefill_step_size",
    "memory_budget_gb",
    "kv_bits",
    "kv_group_size",
    "max_tokens",
    "temp",
    "top_p",
    "chat_template_args",
    "adapter_path",
    "trust_remote_code",
    "gpu_keepalive",
    "running_count_max",
    "drain_timeout_s",
    "log_level",
    "log_format",
    "log_files",
)
PROXY_SETTINGS = (
    "home",
    "host",
    "port",
    "reuse",
    "audit_fraction",
    "audit_tolerance",
    "garbage_guard",
    "disk_budget_gb",
    "queue_count_max",
    "running_count_max",
    "connections_max",
    "connect_timeout_s",
    "queue_timeout_s",
    "stall_timeout_s",
    "total_timeout_s",
    "wedge_timeout_s",
    "receive_timeout_s",
    "send_timeout_s",
    "heartbeat_after_s",
    "on_disconnect",
    "partial_save_tokens",
    "stabilize",
    "cors_origins",
    "lan",
    "allowed_hosts",
    "share_cache",
    "admin_needs_key",
    "drain_timeout_s",
    "log_level",
    "log_format",
    "log_files",
)
DOCTOR_SETTINGS = (
    "prefill_step_size",
    "memory_budget_gb",
    "kv_bits",
    "kv_group_size",
    "chat_template_args",
    "adapter_path",
    "trust_remote_code",
)


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
        *_format_flags(config, BACKEND_SETTINGS),
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
        *_format_flags(config, PROXY_SETTINGS),
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
        *_format_flags(config, DOCTOR_SETTINGS),
        *options,
        *("--", model),
    ]
    return Command("doctor", arguments, environment, 0.0)


def _format_flags(config: ResolvedConfig, names: Iterable[str]) -> list[str]:
    """A text that is "" and a switch that is off have no flag."""
    flags: list[str] = []
    for name in names:
        value, setting = config[name], SETTINGS[name]
        if value is True:
            flags.append(setting.flag)
        elif value is not False and value != "" and not (setting.omit_zero and value == 0):
            flags += [setting.flag, str(value)]
    return flags


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
