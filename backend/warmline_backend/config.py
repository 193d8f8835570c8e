"""The backend's configuration: flags, checked once."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from warmline_wire.flags import GB, gigabytes


class ConfigError(Exception):
    """A flag is wrong; the text says which, and what would be right."""


@dataclass(frozen=True)
class BackendConfig:
    home: Path
    model: str
    served_name: str
    host: str
    port: int
    reuse: str  # "fast", "exact" or "off"
    prefill_step_size: int
    memory_budget_bytes: int  # 0: a share of what the weights leave
    kv_bits: int  # 0: not quantized
    kv_group_size: int
    max_tokens: int  # default of a request that names none; 0: what the context leaves
    running_count_max: int
    drain_timeout_s: float  # what running requests get at a shutdown
    adapter_path: str
    trust_remote_code: bool
    log_level: str


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
        running_count_max=given.running_count_max,
        drain_timeout_s=given.drain_timeout_s,
        adapter_path=given.adapter_path,
        trust_remote_code=given.trust_remote_code,
        log_level=given.log_level.upper(),
    )
    _check(config)
    return config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmline_backend", description="Serves one MLX model on loopback.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--model", required=True, help="folder or repo id that mlx-lm loads")
    parser.add_argument("--served-name", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8025)
    parser.add_argument("--reuse", choices=("fast", "exact", "off"), default="fast")
    parser.add_argument("--prefill-step-size", type=int, default=2048)
    parser.add_argument("--memory-budget-gb", type=gigabytes, default=0.0)
    parser.add_argument("--kv-bits", type=int, default=0)
    parser.add_argument("--kv-group-size", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=0)
    parser.add_argument("--running-count-max", type=int, default=32)
    parser.add_argument("--drain-timeout-s", type=float, default=30.0)
    parser.add_argument("--adapter-path", default="")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _check(config: BackendConfig) -> None:
    if config.host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(f"--host {config.host}: the backend serves loopback only; put the proxy on the network")
    if config.kv_bits not in (0, 4, 8):
        raise ConfigError(f"--kv-bits {config.kv_bits}: expected 0 (off), 4 or 8")
    if config.kv_group_size not in (32, 64, 128):
        raise ConfigError(f"--kv-group-size {config.kv_group_size}: expected 32, 64 or 128")
    for name in ("prefill_step_size", "running_count_max"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(config, name)}: expected at least 1")
    for name in ("memory_budget_bytes", "max_tokens"):
        if getattr(config, name) < 0:
            raise ConfigError(f"--{name.replace('_bytes', '-gb').replace('_', '-')}: expected 0 (automatic) or more")
    if config.reuse == "exact" and config.prefill_step_size < 2:
        raise ConfigError(
            "--prefill-step-size 1: expected at least 2 with --reuse exact, since rotating layers arrange the rows of "
            "single tokens in another way"
        )
    if not 0 <= config.drain_timeout_s < float("inf"):
        raise ConfigError(f"--drain-timeout-s {config.drain_timeout_s}: expected a number of seconds, 0 or more")
