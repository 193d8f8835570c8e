"""Settings table: name, default, parser, help and the processes that take each setting.

A setting `prefill_step_size` is the flag ``--prefill-step-size``, the variable ``WARMLINE_PREFILL_STEP_SIZE`` and the
key ``prefill_step_size`` of ``HOME/warmline.toml``.  Flags, variables, `warmline config`, docs/settings.md and the
configuration of each process are made from this table: a new setting is one entry here, and a field where it is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmline_common.settings import parsers, quantization
from warmline_common.settings.parsers import Value

DEMO_MODEL = "demo"
DEMO_NAME = "smollm2-135m-instruct"

PROXY, BACKEND, DOCTOR = ("proxy",), ("backend",), ("doctor",)
PROXY_BACKEND, BACKEND_DOCTOR = PROXY + BACKEND, BACKEND + DOCTOR


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    `parse` takes text of a flag or variable, or a value of TOML, and returns the value, or raises ValueError with what
    is expected.  `help` is a line of Markdown, for the reference and, without its backticks, for --help.
    """

    name: str
    default: Value
    parse: Callable[[object], Value]
    metavar: str
    processes: tuple[str, ...]  # that get it as a flag
    help: str
    in_toml: bool = True
    has_flag: bool = True
    secret: bool = False
    unset_label: str = "none"  # shown for a default of ""
    omit_zero: bool = False  # 0 leaves the choice to the process, which then isn't given the flag

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def off_flag(self) -> str:
        """Flag that turns a switch off."""
        return "--no-" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "WARMLINE_" + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)


# fmt: off
_ROWS = (
    Setting("home", str(Path.home() / ".warmline"), parsers.parse_home, "DIR", PROXY_BACKEND,
            "folder of all data: index, segments, models, logs, `warmline.toml` (which can't set this "
            "one)", in_toml=False),
    Setting("model", DEMO_MODEL, parsers.parse_model, "MODEL", (),
            "a folder or repository that mlx-lm loads; `demo`: SmolLM2-135M, out of a package. Several (the flag given "
            "again, in the file a list): each is served, the first is the default. With `models`: the name of the "
            "default"),
    Setting("models", "[]", parsers.parse_model_list, "JSON", PROXY,
            "several models with settings of their own, in the file as tables `[[models]]`, else a JSON list of such "
            "objects"),
    Setting("models_memory_gb", 0.0, parsers.parse_gigabytes, "GB", (),
            "memory for all models that are loaded at once, weights and conversations; 0: as the machine allows"),
    Setting("model_stay_s", 20.0, parsers.parse_seconds, "S", PROXY,
            "how long a model that was loaded stays at least before another one takes its place"),
    Setting("served_name", "", parsers.parse_text, "NAME", (),
            "the name that `/v1/models` shows", unset_label="the model's own"),
    Setting("host", "127.0.0.1", parsers.parse_text, "HOST", PROXY,
            "where clients connect; other than loopback needs a client key"),
    Setting("lan", False, parsers.parse_bool, "", PROXY,
            "let other machines connect: bind all interfaces, with a client key that is made where there is none"),
    Setting("allowed_hosts", "", parsers.parse_hosts, "NAMES", PROXY,
            "further names that clients reach this machine by, separated by commas, or `*` for any name"),
    Setting("titles", "text", parsers.make_choice_parser("text", "off"), "WHAT", PROXY,
            "`text`: conversations are shown by the first words of their first user message; `off`: the index keeps "
            "no words of them, and those kept earlier go"),
    Setting("share_cache", False, parsers.parse_bool, "", PROXY,
            "let all client keys reuse each other's cache"),
    Setting("admin_needs_key", False, parsers.parse_bool, "", PROXY,
            "ask for the admin key on this machine, too, for `/admin` and `/warmline`: others have accounts "
            "here, or a reverse proxy runs here (on loopback, `allowed_hosts` does the same)"),
    Setting("port", 8026, parsers.parse_port, "PORT", PROXY, "the port for clients"),
    Setting("backend_port", 8025, parsers.parse_port, "PORT", (), "the backend's port, on loopback only"),
    Setting("client_key", "", parsers.parse_key, "KEY", (),
            "a key for clients, beside those of `cachectl key`; never a flag, since command lines are "
            "visible to all", has_flag=False, secret=True),
    Setting("cors_origins", "", parsers.parse_origins, "ORIGINS", PROXY,
            "origins of web pages that may use `/v1` from a browser, separated by commas, or `*` for any page"),
    Setting("reuse", "fast", parsers.make_choice_parser("fast", "exact", "off"), "MODE", PROXY_BACKEND,
            "`fast` reuses all stored KV, `exact` only KV that gives a cold run's exact bits, `off` nothing"),
    Setting("audit_fraction", 0.01, parsers.parse_share, "SHARE", PROXY,
            "share of the warm requests that are computed again, cold, when the engine is idle; 0: none"),
    Setting("audit_quiet_s", 10.0, parsers.parse_seconds, "S", PROXY,
            "seconds without a request before an audit begins, at least; 0: none, not even the conversation's pauses"),
    Setting("audit_tolerance", 0.0, parsers.make_amount_parser("nats", 0, 1e6), "NATS", PROXY,
            "how far log-probabilities may differ from a cold run's, in nats; 0: as the KV's type allows"),
    Setting("garbage_guard", "observe", parsers.make_choice_parser("off", "observe"), "WHAT", PROXY,
            "`observe` has a warm answer that collapses into repetition audited before all others; `off`"),
    Setting("prefill_step_size", 2048, parsers.parse_step_size, "TOKENS", BACKEND_DOCTOR,
            "tokens that prefill computes at a time; `auto`: measured at the first start with a model, and remembered"),
    Setting("memory_budget_gb", 0.0, parsers.parse_gigabytes, "GB", BACKEND_DOCTOR,
            "memory for conversations; 0: as the machine allows", omit_zero=True),
    Setting("wired_limit_gb", 0.0, parsers.parse_gigabytes, "GB", BACKEND_DOCTOR,
            "on a Mac, memory that mlx keeps wired, which macOS then never pages out: as much as the weights take; 0: "
            "none, the safest ([why](install-macos.md#memory))", omit_zero=True),
    Setting("mlx_cache_gb", 0.0, parsers.parse_gigabytes, "GB", BACKEND,
            "most memory in freed buffers that mlx keeps for reuse; 0, and at most: a tenth of what the weights leave",
            omit_zero=True),
    Setting("disk_budget_gb", 50.0, parsers.parse_gigabytes, "GB", PROXY, "disk for conversations, index included"),
    Setting("segment_compression", "auto", parsers.make_choice_parser("auto", "off"), "WHEN", BACKEND,
            "store `bfloat16` KV in two thirds of its bytes, bit for bit: `auto` where the disk is slower than "
            "decoding, or its budget nearly used; `off`: never"),
    Setting("responses_keep_days", 30.0, parsers.parse_days, "DAYS", PROXY,
            "how long answers of `/v1/responses` are stored, as text, for clients that refer to them; `off` or 0: not "
            "stored"),
    Setting("responses_keep_mb", 256.0, parsers.make_amount_parser("megabytes", 0, 1e6), "MB", PROXY,
            "disk for these answers, compressed, of the disk budget (a tenth of it at most); the oldest go first, and "
            "one that is larger even before it is compressed is not stored"),
    Setting("kv_bits", 0, quantization.parse_bits, "BITS", BACKEND_DOCTOR,
            "quantize the KV cache to 2, 3, 4, 5, 6 or 8 bits, or keys and values apart: `8,4`; 0: keep it as computed",
            omit_zero=True),
    Setting("kv_group_size", 64, quantization.parse_group_size, "N", BACKEND_DOCTOR,
            "values quantized together: 32, 64 or 128, or for keys and values apart: `64,32`"),
    Setting("kv_boundary_layers", 0, parsers.make_integer_parser(0, quantization.BOUNDARY_LAYERS_MAX), "LAYERS",
            BACKEND_DOCTOR, "so many of the first and of the last layers are quantized to `kv_boundary_bits`",
            omit_zero=True),
    Setting("kv_boundary_bits", 0, quantization.parse_bits, "BITS", BACKEND_DOCTOR,
            "bits of these layers, as in `kv_bits`; groups are those of `kv_group_size`", omit_zero=True),
    Setting("speculation", "auto", parsers.make_choice_parser("auto", "off"), "WHEN", BACKEND_DOCTOR,
            "draft tokens that an answer may go on with, and check several in one pass, which changes no answer: "
            "`auto` where that is faster; `off`: never"),
    Setting("draft_model", "", parsers.parse_optional_model, "MODEL", BACKEND_DOCTOR,
            "a small model with the same tokenizer, a folder or repository, that drafts tokens which the model then "
            "checks"),
    Setting("max_tokens", 0, parsers.make_integer_parser(0, 10000000), "TOKENS", BACKEND,
            "answer length where a request sets none; 0: no limit", omit_zero=True),
    Setting("temp", 0.0, parsers.parse_temperature, "T", BACKEND,
            "temperature where a request sets none; 0: the likeliest token"),
    Setting("top_p", 1.0, parsers.parse_share, "SHARE", BACKEND, "nucleus sampling where a request sets none; 1: off"),
    Setting("chat_template_args", "{}", parsers.parse_json_object, "JSON", BACKEND_DOCTOR,
            "a JSON object (in the file also a table) of arguments for the chat template, such as "
            "`{\"enable_thinking\": false}`; a request's `chat_template_kwargs` go first, key by key"),
    Setting("adapter_path", "", parsers.parse_path, "DIR", BACKEND_DOCTOR, "a LoRA adapter for the model"),
    Setting("trust_remote_code", False, parsers.parse_bool, "", BACKEND_DOCTOR, "let code that comes with a model run"),
    Setting("gpu_keepalive", 0.0, parsers.parse_seconds, "S", BACKEND,
            "seconds of idleness after which the engine computes a token, again and again, so that the GPU "
            "stays awake; 0: never"),
    Setting("queue_count_max", 64, parsers.make_integer_parser(0, 100000), "N", PROXY,
            "requests that may wait; more are answered 429"),
    Setting("running_count_max", 16, parsers.make_integer_parser(1, 10000), "N", PROXY_BACKEND,
            "requests computed at once"),
    Setting("connections_max", 2048, parsers.make_integer_parser(1, 1000000), "N", PROXY,
            "connections that clients may have open; beyond, those that wait for their clients are closed, then new "
            "ones get 503"),
    Setting("body_budget_mb", 256, parsers.make_integer_parser(1, 1000000), "MB", PROXY,
            "memory for the bodies of all requests and the stored items that they refer to, decompressed, until they "
            "are answered; beyond, bodies that are still being received make way, then new ones get 503"),
    Setting("connect_timeout_s", 60.0, parsers.parse_seconds, "S", PROXY,
            "how long a request waits for a backend that starts, or is started again; 0: no limit"),
    Setting("queue_timeout_s", 0.0, parsers.parse_seconds, "S", PROXY,
            "how long a request may wait for its turn; 0: no limit"),
    Setting("stall_timeout_s", 300.0, parsers.parse_seconds, "S", PROXY,
            "how long a request may make no progress at all, not a chunk, not a token; 0: no limit"),
    Setting("total_timeout_s", 0.0, parsers.parse_seconds, "S", PROXY,
            "how long a request may take in all; 0: no limit"),
    Setting("wedge_timeout_s", 120.0, parsers.parse_positive_seconds, "S", PROXY,
            "how long the engine may be busy with one step before the backend is started again"),
    Setting("receive_timeout_s", 60.0, parsers.parse_positive_seconds, "S", PROXY,
            "for the whole head of a request, and for each next piece of its body, which must come at 1,000 bytes a "
            "second at least"),
    Setting("send_timeout_s", 300.0, parsers.parse_positive_seconds, "S", PROXY,
            "for a client to take the next piece of its answer"),
    Setting("heartbeat_after_s", 0.0, parsers.parse_seconds, "S", PROXY,
            "when a client that waits for JSON gets a first sign of life; 0: never"),
    Setting("on_disconnect", "stop", parsers.make_choice_parser("stop", "finish-prefill"), "WHAT", PROXY,
            "when a client leaves: `stop`, or `finish-prefill` while no other request needs the engine"),
    Setting("partial_save_tokens", 8192, parsers.make_integer_parser(0, 10000000), "TOKENS", PROXY,
            "a running prefill is saved every so many tokens; 0: only at its end"),
    Setting("prewarm", "[]", parsers.parse_prewarm_list, "JSON", PROXY,
            "prompts that are computed while the engine is idle, in the file as tables `[[prewarm]]`, else a JSON list "
            "of such objects (prewarm.md)"),
    Setting("stabilize", "", parsers.parse_rules, "RULES", PROXY,
            "replace volatile text at the start of prompts: some of `times`, `dates`, `ids`, "
            "`billing`, `tool-order`"),
    Setting("drain_timeout_s", 30.0, parsers.parse_seconds, "S", PROXY_BACKEND,
            "time for running requests to finish when Warmline stops: for the proxy, and then for the backend; either "
            "may take up to 15 s more to save"),
    Setting("log_level", "info", parsers.make_choice_parser("debug", "info", "warning", "error"), "LEVEL",
            PROXY_BACKEND, "`debug`, `info`, `warning` or `error`"),
    Setting("log_format", "text", parsers.make_choice_parser("text", "json"), "FORMAT", PROXY_BACKEND,
            "`text`: lines for people; `json`: an object a line"),
    Setting("log_files", False, parsers.parse_bool, "", PROXY_BACKEND,
            "log to `HOME/logs`, in files that are rotated, and not to stderr"),
)
# fmt: on

SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _ROWS}


def get_default(name: str) -> Any:
    return SETTINGS[name].default


def list_settings(process: str) -> list[Setting]:
    """Settings that a process takes as flags, in the table's order."""
    return [setting for setting in _ROWS if process in setting.processes]


def format_flags(process: str, values: Callable[[str], Value]) -> list[str]:
    """Command line of a process: its settings as flags.  An empty text and a switch that is off have no flag."""
    flags: list[str] = []
    for setting in list_settings(process):
        value = values(setting.name)
        if value is True:
            flags.append(setting.flag)
        elif value is not False and value != "" and not (setting.omit_zero and value == 0):
            flags += [setting.flag, str(value)]
    return flags
