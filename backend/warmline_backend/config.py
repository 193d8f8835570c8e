"""The backend's configuration: flags, checked once."""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from warmline_backend.prompt.messages import RESERVED_KWARGS
from warmline_common.process.arguments import GB, gigabytes
from warmline_common.process.console import write_line

STEP_AUTO = "auto"
STEP_DIGITS_MAX = 9
SECONDS_MAX = 1e9  # what a wait can be told


class BackendConfigError(Exception):
    """A flag is wrong; the text says which, and what would be right."""


@dataclass(frozen=True)
class BackendConfig:
    home: Path
    model: str
    served_name: str
    host: str
    port: int
    reuse: str  # "fast", "exact" or "off"
    prefill_step_size: int  # 0: what is best here, measured once a model
    memory_budget_bytes: int  # 0: a share of what the weights leave
    kv_bits: int  # 0: not quantized
    kv_group_size: int
    max_tokens: int  # default of a request that names none; 0: what the context leaves
    temperature: float  # defaults of a request that names none
    top_p: float
    template_args: dict[str, Any]  # for the chat template; a request's own go first
    running_count_max: int
    gpu_keepalive_s: float  # how long the engine is idle before it computes a token for nobody; 0: for ever
    drain_timeout_s: float  # what running requests get at a shutdown
    adapter_path: str
    trust_remote_code: bool
    log_level: str
    log_format: str  # "text" or "json"
    log_files: bool  # into HOME/logs, rotated, instead of stderr


def parse_config(arguments: list[str]) -> BackendConfig:
    """Raises ConfigError; argparse itself exits with code 2 on flags it doesn't know."""
    given = _parser().parse_args(arguments)
    config = BackendConfig(
        home=given.home.expanduser().absolute(),
        model=given.model,
        served_name=given.served_name or Path(given.model).name,
        host=given.host,
        port=given.port,
        reuse=given.reuse,
        prefill_step_size=given.prefill_step_size,
        memory_budget_bytes=int(given.memory_budget_gb * GB),
        kv_bits=given.kv_bits,
        kv_group_size=given.kv_group_size,
        max_tokens=given.max_tokens,
        temperature=given.temp,
        top_p=given.top_p,
        template_args=given.chat_template_args,
        running_count_max=given.running_count_max,
        gpu_keepalive_s=given.gpu_keepalive,
        drain_timeout_s=given.drain_timeout_s,
        adapter_path=given.adapter_path,
        trust_remote_code=given.trust_remote_code,
        log_level=given.log_level.upper(),
        log_format=given.log_format,
        log_files=given.log_files,
    )
    _check_config(config)
    return config


class _Parser(argparse.ArgumentParser):
    """argparse, but bad flags cost one line instead of a page."""

    def error(self, message: str) -> NoReturn:
        write_line(f"warmline backend: {message}")
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="warmline_backend", description="Serves one MLX model on loopback.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--model", required=True, help="folder or repo id that mlx-lm loads")
    parser.add_argument("--served-name", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8025)
    parser.add_argument("--reuse", choices=("fast", "exact", "off"), default="fast")
    parser.add_argument("--prefill-step-size", type=parse_step_size, default=2048)
    parser.add_argument("--memory-budget-gb", type=gigabytes, default=0.0)
    parser.add_argument("--kv-bits", type=int, default=0)
    parser.add_argument("--kv-group-size", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=0)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--chat-template-args", type=parse_template_args, default={})
    parser.add_argument("--gpu-keepalive", type=float, default=0.0)
    parser.add_argument("--running-count-max", type=int, default=32)
    parser.add_argument("--drain-timeout-s", type=float, default=30.0)
    parser.add_argument("--adapter-path", default="")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--log-format", default="text", choices=("text", "json"))
    parser.add_argument("--log-files", action="store_true")
    return parser


def parse_step_size(text: str) -> int:
    """argparse's type for a prefill step; 0 for "auto"."""
    if text == STEP_AUTO:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) <= STEP_DIGITS_MAX and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a number of tokens, at least 1, or {STEP_AUTO}, not {text[:40]}")
    return int(text)


def parse_template_args(text: str) -> dict[str, Any]:
    """argparse's type for a JSON object that a chat template can be given."""
    try:
        given = json.loads(text, parse_constant=_reject_json_constant)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, not {text[:200]}: {error}") from None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, not {text[:200]}")
    return given


def describe_reserved_args(args: Mapping[str, object]) -> str:
    """What is wrong with template arguments that this server sets itself; "" where there are none."""
    names = sorted(RESERVED_KWARGS & args.keys())
    return f"--chat-template-args may not set {', '.join(names)}: requests and this server do" if names else ""


def _reject_json_constant(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _check_config(config: BackendConfig) -> None:
    if config.host not in ("127.0.0.1", "::1", "localhost"):
        raise BackendConfigError(
            f"--host {config.host}: the backend serves loopback only; put the proxy on the network"
        )
    if config.kv_bits not in (0, 4, 8):
        raise BackendConfigError(f"--kv-bits {config.kv_bits}: expected 0 (off), 4 or 8")
    if config.kv_group_size not in (32, 64, 128):
        raise BackendConfigError(f"--kv-group-size {config.kv_group_size}: expected 32, 64 or 128")
    if config.running_count_max < 1:
        raise BackendConfigError(f"--running-count-max {config.running_count_max}: expected at least 1")
    for name in ("memory_budget_bytes", "max_tokens"):
        if getattr(config, name) < 0:
            raise BackendConfigError(
                f"--{name.replace('_bytes', '-gb').replace('_', '-')}: expected 0 (automatic) or more"
            )
    if config.reuse == "exact" and config.prefill_step_size == 1:
        raise BackendConfigError(
            "--prefill-step-size 1: expected at least 2 with --reuse exact, since rotating layers arrange the rows of "
            "single tokens in another way"
        )
    if not 0 <= config.temperature < math.inf:
        raise BackendConfigError(f"--temp {config.temperature}: expected a number, 0 or more")
    if not 0 <= config.top_p <= 1:
        raise BackendConfigError(f"--top-p {config.top_p}: expected a share, from 0 to 1")
    if problem := describe_reserved_args(config.template_args):
        raise BackendConfigError(problem)
    for flag, seconds in (("drain-timeout-s", config.drain_timeout_s), ("gpu-keepalive", config.gpu_keepalive_s)):
        if not 0 <= seconds <= SECONDS_MAX:
            raise BackendConfigError(f"--{flag} {seconds}: expected a number of seconds, 0 or more")
