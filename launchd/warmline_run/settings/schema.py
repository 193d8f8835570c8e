"""Every setting of Warmline in one table: its name, its default, what it may be, what it means.

A setting `prefill_step_size` is the flag ``--prefill-step-size``, the variable ``WARMLINE_PREFILL_STEP_SIZE`` and the
key ``prefill_step_size`` of ``HOME/warmline.toml``.
"""

import ipaddress
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Value = str | int | float | bool

DEMO_MODEL = "demo"
REUSE = ("fast", "exact", "off")
ON_DISCONNECT = ("stop", "finish-prefill")
GARBAGE_GUARD = ("off", "observe")
STABILIZE = ("times", "dates", "ids", "billing", "tool-order")
HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
STEP_AUTO = "auto"
STEP_TOKENS_MAX = 65536
TEMPLATE_ARGS_BYTES_MAX = 65536  # an argument of a command may have twice as many
TEMPLATE_ARGS_EXAMPLE = '{"enable_thinking": false}'


@dataclass(frozen=True)
class Setting:
    """`help` is a line of Markdown, for the reference and, without its backticks, for --help.

    `parse` takes what a flag, a variable or TOML gave and returns the value, or raises ValueError saying why.
    """

    name: str
    default: Value
    parse: Callable[[object], Value]
    metavar: str
    help: str
    in_toml: bool = True
    has_flag: bool = True
    secret: bool = False
    unset_label: str = "none"  # what "" means as a default, for people
    omit_zero: bool = False  # 0 leaves the choice to the process, which then isn't given the flag

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def off_flag(self) -> str:
        """Of a switch."""
        return "--no-" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "WARMLINE_" + self.name.upper()


def parse_text(raw: object) -> str:
    if not isinstance(raw, str) or "\0" in raw:  # no command can be given that
        raise ValueError("expected text")
    return raw


def parse_key(raw: object) -> str:
    """One that a client can send in a header, and that arrives there as it is."""
    key = parse_text(raw)
    if key != key.strip() or not key.isprintable():
        raise ValueError("expected printable characters, and no spaces at the ends: no client could send that")
    return key


def parse_path(raw: object) -> str:
    return str(Path(parse_text(raw)).expanduser()) if raw else ""


def parse_home(raw: object) -> str:
    if not raw:
        raise ValueError("expected a directory")
    return str(Path(parse_text(raw)).expanduser().absolute())


def parse_model(raw: object) -> str:
    """A folder or a repository's name; ~ is expanded only where it leads, since the name may be no path at all."""
    name = parse_text(raw).strip()
    if not name:
        raise ValueError("expected a folder, a repository's name, or demo")
    return str(Path(name).expanduser()) if name.startswith("~") else name


def make_integer_parser(low: int, high: int) -> Callable[[object], int]:
    def parse(raw: object) -> int:
        problem = f"expected a whole number from {low} to {high}"
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise ValueError(problem)
        try:
            number = int(raw)
        except ValueError:
            raise ValueError(problem) from None
        if not low <= number <= high:
            raise ValueError(problem)
        return number

    return parse


def make_amount_parser(unit: str, low: float, below: float) -> Callable[[object], float]:
    return _make_number_parser(f"expected a number of {unit}, {low:g} or more", lambda number: low <= number < below)


def _make_number_parser(problem: str, fits: Callable[[float], bool]) -> Callable[[object], float]:
    def parse(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError(problem)
        try:
            number = float(raw)
        except (ValueError, OverflowError):  # TOML's integers may be of any size
            raise ValueError(problem) from None
        if not fits(number):  # also refuses nan
            raise ValueError(problem)
        return number

    return parse


def make_choice_parser(*allowed: Value) -> Callable[[object], Value]:
    def parse(raw: object) -> Value:
        for choice in allowed:
            if str(raw) == str(choice):
                return choice
        raise ValueError("expected " + ", ".join(map(str, allowed[:-1])) + f" or {allowed[-1]}")

    return parse


def parse_bool(raw: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    answer = raw if isinstance(raw, bool) else words.get(str(raw).lower())
    if answer is None:
        raise ValueError("expected true or false")
    return answer


def parse_step_size(raw: object) -> Value:
    """Tokens, or `STEP_AUTO`: the backend measures what is best here."""
    if raw == STEP_AUTO:
        return STEP_AUTO
    try:
        return make_integer_parser(1, STEP_TOKENS_MAX)(raw)
    except ValueError as error:
        raise ValueError(f"{error}, or {STEP_AUTO}") from None


def parse_rules(raw: object) -> str:
    """Names out of `STABILIZE`; "" for none."""
    return _parse_names(raw, f"expected some of {', '.join(STABILIZE)}, separated by commas", STABILIZE.__contains__)


def parse_origins(raw: object) -> str:
    """What browsers send as a page's Origin, or "*" for any; "" for none."""
    problem = "expected origins such as https://app.example or http://localhost:3000, separated by commas, or *"
    return _parse_names(raw, problem, lambda name: name == "*" or bool(ORIGIN.fullmatch(name.lower())))


def parse_hosts(raw: object) -> str:
    """Host names or addresses without a port, or "*"; "" for none."""
    problem = "expected host names such as studio.example, separated by commas, or *"
    return _parse_names(raw, problem, lambda name: name == "*" or bool(HOST_NAME.fullmatch(name.lower()))).lower()


def _parse_names(raw: object, problem: str, fits: Callable[[str], bool]) -> str:
    """Separated by commas in text, or a TOML array."""
    given = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError(problem)
    names = [name.strip() for name in given if name.strip()]
    if not all(map(fits, names)):
        raise ValueError(problem)
    return ",".join(dict.fromkeys(names))


def parse_json_object(raw: object) -> str:
    """An object as JSON text: from JSON text, or from a TOML table.  "{}" for an empty text."""
    try:
        given = json.loads(raw or "{}", parse_constant=_refuse_constant) if isinstance(raw, str) else raw
        if isinstance(given, dict):
            written = json.dumps(given, allow_nan=False, ensure_ascii=False)
            if len(written.encode()) > TEMPLATE_ARGS_BYTES_MAX:
                raise ValueError(f"longer than {TEMPLATE_ARGS_BYTES_MAX} bytes")
            return written
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: TOML also has dates
        raise ValueError(f"expected a JSON object such as {TEMPLATE_ARGS_EXAMPLE} ({error})") from None
    raise ValueError(f"expected a JSON object such as {TEMPLATE_ARGS_EXAMPLE}")


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


parse_share = _make_number_parser("expected a share, from 0 to 1", lambda number: 0 <= number <= 1)
parse_temperature = _make_number_parser("expected a number, 0 or more", lambda number: 0 <= number < float("inf"))
parse_port = make_integer_parser(1, 65535)
parse_gigabytes = make_amount_parser("gigabytes", 0, 1e6)
parse_seconds = make_amount_parser("seconds", 0, 1e9)
parse_positive_seconds = make_amount_parser("seconds", 0.001, 1e9)  # where none would be no limit, but no service

SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "home",
            str(Path.home() / ".warmline"),
            parse_home,
            "DIR",
            "where everything is kept: index, segments, models, logs, `warmline.toml` (which can't set this one)",
            in_toml=False,  # the file lies in the home
        ),
        Setting(
            "model",
            DEMO_MODEL,
            parse_model,
            "MODEL",
            "a folder or repository that mlx-lm loads; `demo`: SmolLM2-135M, out of a package",
        ),
        Setting(
            "served_name", "", parse_text, "NAME", "the name that `/v1/models` shows", unset_label="the model's own"
        ),
        Setting(
            "host", "127.0.0.1", parse_text, "HOST", "where clients connect; other than loopback needs a client key"
        ),
        Setting(
            "lan",
            False,
            parse_bool,
            "",
            "let other machines connect: bind all interfaces, with a client key that is made where there is none",
        ),
        Setting(
            "allowed_hosts",
            "",
            parse_hosts,
            "NAMES",
            "further names that clients reach this machine by, separated by commas, or `*` for any name",
        ),
        Setting(
            "share_cache",
            False,
            parse_bool,
            "",
            "let the holders of all client keys reuse what any of them has had computed",
        ),
        Setting(
            "admin_needs_key",
            False,
            parse_bool,
            "",
            "ask for the admin key on this machine, too, for `/admin` and `/warmline`: others have accounts here, or a "
            "reverse proxy runs here (on loopback, `allowed_hosts` does the same)",
        ),
        Setting("port", 8026, parse_port, "PORT", "the port for clients"),
        Setting("backend_port", 8025, parse_port, "PORT", "the backend's port, on loopback only"),
        Setting(
            "client_key",
            "",
            parse_key,
            "KEY",
            "a key for clients, beside those of `cachectl key`; never a flag, since command lines are visible to all",
            has_flag=False,
            secret=True,
        ),
        Setting(
            "cors_origins",
            "",
            parse_origins,
            "ORIGINS",
            "origins of web pages that may use `/v1` from a browser, separated by commas, or `*` for any page",
        ),
        Setting(
            "reuse",
            "fast",
            make_choice_parser(*REUSE),
            "MODE",
            "`fast` reuses all that is kept, `exact` only what gives a cold run's very bits, `off` nothing",
        ),
        Setting(
            "audit_fraction",
            0.01,
            parse_share,
            "SHARE",
            "share of the warm requests that are computed again, cold, when the engine is idle; 0: none",
        ),
        Setting(
            "audit_tolerance",
            0.0,
            make_amount_parser("nats", 0, 1e6),
            "NATS",
            "how far log-probabilities may differ from a cold run's, in nats; 0: as the KV's type allows",
        ),
        Setting(
            "garbage_guard",
            "observe",
            make_choice_parser(*GARBAGE_GUARD),
            "WHAT",
            "`observe` has a warm answer that collapses into repetition audited before all others; `off`",
        ),
        Setting(
            "prefill_step_size",
            2048,
            parse_step_size,
            "TOKENS",
            "tokens that prefill computes at a time; `auto`: measured at the first start with a model, and remembered",
        ),
        Setting(
            "memory_budget_gb",
            0.0,
            parse_gigabytes,
            "GB",
            "memory for conversations; 0: as the machine allows",
            omit_zero=True,
        ),
        Setting("disk_budget_gb", 50.0, parse_gigabytes, "GB", "disk for conversations, index included"),
        Setting(
            "kv_bits",
            0,
            make_choice_parser(0, 4, 8),
            "BITS",
            "quantize the KV cache to 4 or 8 bits; 0: keep it as computed",
            omit_zero=True,
        ),
        Setting("kv_group_size", 64, make_choice_parser(32, 64, 128), "N", "values quantized together: 32, 64 or 128"),
        Setting(
            "max_tokens",
            0,
            make_integer_parser(0, 10_000_000),
            "TOKENS",
            "answer length where a request sets none; 0: no limit",
            omit_zero=True,
        ),
        Setting("temp", 0.0, parse_temperature, "T", "temperature where a request sets none; 0: the likeliest token"),
        Setting("top_p", 1.0, parse_share, "SHARE", "nucleus sampling where a request sets none; 1: off"),
        Setting(
            "chat_template_args",
            "{}",
            parse_json_object,
            "JSON",
            "a JSON object (in the file also a table) of arguments for the chat template, such as "
            '`{"enable_thinking": false}`; a request\'s `chat_template_kwargs` go first, key by key',
        ),
        Setting("adapter_path", "", parse_path, "DIR", "a LoRA adapter for the model"),
        Setting("trust_remote_code", False, parse_bool, "", "let code that comes with a model run"),
        Setting(
            "gpu_keepalive",
            0.0,
            parse_seconds,
            "S",
            "seconds of idleness after which the engine computes a token, again and again, so "
            "that the GPU stays awake; 0: never",
        ),
        Setting(
            "queue_count_max", 64, make_integer_parser(0, 100_000), "N", "requests that may wait; more are answered 429"
        ),
        Setting("running_count_max", 16, make_integer_parser(1, 10_000), "N", "requests computed at once"),
        Setting(
            "connections_max",
            2048,
            make_integer_parser(1, 1_000_000),
            "N",
            "connections that clients may have open; beyond, idle ones are closed, then newcomers get 503",
        ),
        Setting(
            "connect_timeout_s",
            60.0,
            parse_seconds,
            "S",
            "how long a request waits for a backend that starts, or is started again; 0: no limit",
        ),
        Setting("queue_timeout_s", 0.0, parse_seconds, "S", "how long a request may wait for its turn; 0: no limit"),
        Setting(
            "stall_timeout_s",
            300.0,
            parse_seconds,
            "S",
            "how long a request may make no progress at all, not a chunk, not a token; 0: no limit",
        ),
        Setting("total_timeout_s", 0.0, parse_seconds, "S", "how long a request may take in all; 0: no limit"),
        Setting(
            "wedge_timeout_s",
            120.0,
            parse_positive_seconds,
            "S",
            "how long the engine may be busy with one step before the backend is started again",
        ),
        Setting(
            "receive_timeout_s",
            60.0,
            parse_positive_seconds,
            "S",
            "for the whole head of a request, and for each next piece of its body",
        ),
        Setting(
            "send_timeout_s", 300.0, parse_positive_seconds, "S", "for a client to take the next piece of its answer"
        ),
        Setting(
            "heartbeat_after_s",
            0.0,
            parse_seconds,
            "S",
            "when a client that waits for JSON gets a first sign of life; 0: never",
        ),
        Setting(
            "on_disconnect",
            "stop",
            make_choice_parser(*ON_DISCONNECT),
            "WHAT",
            "for a client that leaves: `stop`, or `finish-prefill` when nobody else needs the engine",
        ),
        Setting(
            "partial_save_tokens",
            8192,
            make_integer_parser(0, 10_000_000),
            "TOKENS",
            "a running prefill is saved every so many tokens; 0: only at its end",
        ),
        Setting(
            "stabilize",
            "",
            parse_rules,
            "RULES",
            "replace what changes at the top of prompts and means nothing: some of `times`, "
            "`dates`, `ids`, `billing`, `tool-order`",
        ),
        Setting(
            "drain_timeout_s", 30.0, parse_seconds, "S", "what running requests get to finish when Warmline is stopped"
        ),
        Setting("log_level", "info", make_choice_parser(*LOG_LEVELS), "LEVEL", "`debug`, `info`, `warning` or `error`"),
        Setting(
            "log_format",
            "text",
            make_choice_parser(*LOG_FORMATS),
            "FORMAT",
            "`text`: lines for people; `json`: an object a line",
        ),
        Setting("log_files", False, parse_bool, "", "log to `HOME/logs`, in files that are rotated, and not to stderr"),
    )
}
