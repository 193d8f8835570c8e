"""Configuration of the backend: its flags, checked by the settings table."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmline_common.process.arguments import GB
from warmline_common.process.loopback import is_loopback
from warmline_common.settings.flags import FlagParser, SettingError
from warmline_common.settings.parsers import STEP_AUTO, Value
from warmline_common.settings.quantization import KvQuantization, make_quantization

# The renderer itself passes these to a template; nobody may replace the template or the conversation.
RESERVED_TEMPLATE_ARGS = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages"}
    | {"max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"}
    | {"sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation"}
)
_INSTANCE = re.compile(r"[a-z0-9._-]{1,64}")


class BackendConfigError(Exception):
    """A flag is wrong; the text says which, and what would be right."""


@dataclass(frozen=True)
class BackendConfig:
    """Settings of one backend."""

    home: Path
    instance: str  # tells the backends of several models in one home apart; "" for the only one
    model: str
    served_name: str
    host: str
    port: int  # 0: any free one
    reuse: str  # "fast", "exact" or "off"
    prefill_step_size: int  # 0: the best size here, measured once a model
    memory_budget_bytes: int  # 0: a share of the memory that the weights leave
    wired_limit_bytes: int  # that mlx keeps wired, on a Mac; 0: none
    mlx_cache_bytes: int  # of freed buffers that mlx keeps; 0: a share of the memory that the weights leave
    memory_limit_bytes: int  # memory of the machine to reckon with; 0: the device's
    memory_share_bytes: int  # of the budget, until PUT /kv/memory; 0: all of it
    memory_usable_bytes: int  # of that memory, until PUT /kv/memory; 0: all of it
    warm_up_s: float  # time for the warm-up, which ends sooner then; 0.0: by device
    kv_bits: Value  # 0: not quantized; a number, or "8,4" for keys and values, as all but the layers
    kv_group_size: Value
    kv_boundary_layers: int
    kv_boundary_bits: Value
    segment_compression: str  # "auto" or "off"
    speculation: str  # "auto" or "off"
    draft_model: str  # a folder or repository; "" for none
    max_tokens: int  # default of a request that names none; 0: the rest of the context
    temperature: float  # defaults of a request that names none
    top_p: float
    template_args: dict[str, Any]  # for the chat template; a request's own go first
    running_count_max: int
    gpu_keepalive_s: float  # idle time after which the engine computes a token; 0: never
    drain_timeout_s: float  # time that running requests get at a shutdown
    adapter_path: str
    trust_remote_code: bool
    log_level: str
    log_format: str  # "text" or "json"
    log_files: bool  # into HOME/logs, rotated, instead of stderr

    @property
    def kv_quantization(self) -> KvQuantization | None:
        return make_quantization(self.kv_bits, self.kv_group_size, self.kv_boundary_layers, self.kv_boundary_bits)


def parse_config(arguments: list[str]) -> BackendConfig:
    """Configuration from flags.  Raises BackendConfigError; argparse exits with code 2 on an unknown flag."""
    parser = FlagParser("backend", "Serves one MLX model on loopback.")
    parser.add_argument("--model", required=True, help="folder or repo id that mlx-lm loads")
    parser.add_argument("--served-name", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8025, help="0: any free one")
    parser.add_argument("--instance", default="", help="name of this backend among several in one home")
    parser.add_argument("--warm-up-s", type=float, default=0.0, help="set by the keeper for loads on demand")
    for flag in ("--memory-limit-bytes", "--memory-share-bytes", "--memory-usable-bytes"):
        parser.add_argument(flag, type=_byte_count, default=0, help="set by the keeper of several models")
    try:
        values = parser.parse_values(arguments)
    except SettingError as error:
        raise BackendConfigError(str(error)) from None
    step_size = values.pop("prefill_step_size")
    config = BackendConfig(
        home=Path(values.pop("home")),
        served_name=values.pop("served_name") or Path(values["model"]).name,
        prefill_step_size=0 if step_size == STEP_AUTO else step_size,
        memory_budget_bytes=int(values.pop("memory_budget_gb") * GB),
        wired_limit_bytes=int(values.pop("wired_limit_gb") * GB),
        mlx_cache_bytes=int(values.pop("mlx_cache_gb") * GB),
        temperature=values.pop("temp"),
        template_args=json.loads(values.pop("chat_template_args")),
        gpu_keepalive_s=values.pop("gpu_keepalive"),
        log_level=values.pop("log_level").upper(),
        **values,
    )
    if config.instance and not _INSTANCE.fullmatch(config.instance):
        raise BackendConfigError(f"--instance {config.instance[:64]}: expected 1 to 64 of a-z 0-9 . _ -")
    if problem := _find_problem(config):
        raise BackendConfigError(problem)
    return config


def _byte_count(text: str) -> int:
    """argparse type for a number of bytes.  Raises ValueError."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _find_problem(config: BackendConfig) -> str:
    """Error text for values that don't go together; "" where they do."""
    if not is_loopback(config.host):
        return f"--host {config.host}: the backend serves loopback only; put the proxy on the network"
    if config.reuse == "exact" and config.prefill_step_size == 1:
        return (
            "--prefill-step-size 1: expected at least 2 with --reuse exact, since rotating layers arrange the rows of "
            "single tokens in another way"
        )
    if config.kv_bits and config.kv_boundary_layers and not config.kv_boundary_bits:
        return f'--kv-boundary-layers {config.kv_boundary_layers}: expected --kv-boundary-bits with it, such as "8,8"'
    return describe_reserved_args(config.template_args)


def describe_reserved_args(args: Mapping[str, object]) -> str:
    """Error text for template arguments that this server sets itself; "" where there are none."""
    names = sorted(RESERVED_TEMPLATE_ARGS & args.keys())
    return f"--chat-template-args may not set {', '.join(names)}: requests and this server do" if names else ""
