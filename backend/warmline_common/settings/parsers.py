"""Parsers of settings: text, or a value of TOML, to a checked value.

Pure; each raises ValueError, which says what was expected.
"""

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from warmline_common.process.loopback import is_ip_address

Value = str | int | float | bool
N = TypeVar("N", int, float)

STABILIZE_RULES = ("times", "dates", "ids", "billing", "tool-order")
STEP_AUTO = "auto"
OFF = "off"
STEP_TOKENS_MAX = 65536
TEMPLATE_ARGS_BYTES_MAX = 65536  # an argument of a command may have twice as many
TEMPLATE_ARGS_EXAMPLE = '{"enable_thinking": false}'
HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")


def parse_text(raw: object) -> str:
    if not isinstance(raw, str) or "\0" in raw:  # no command line can contain NUL
        raise ValueError("expected text")
    return raw


def parse_key(raw: object) -> str:
    """Key that a client can send unchanged in a header."""
    key = parse_text(raw)
    if key != key.strip() or not key.isprintable():
        raise ValueError("expected printable characters, and no spaces at the ends: no client could send that")
    return key


def parse_path(raw: object) -> str:
    return str(Path(parse_text(raw)).expanduser()) if raw else ""


def parse_home(raw: object) -> str:
    if not raw:
        raise ValueError("expected a directory")
    home = str(Path(parse_text(raw)).expanduser().absolute())
    try:
        home.encode()
    except UnicodeEncodeError:  # for LMDB
        raise ValueError("expected a directory whose path is UTF-8") from None
    return home


def parse_model(raw: object) -> str:
    """Folder or repository's name; ~ is expanded only at the beginning, since the name may be no path."""
    name = parse_text(raw).strip()
    if not name:
        raise ValueError("expected a folder, a repository's name, or demo")
    return str(Path(name).expanduser()) if name.startswith("~") else name


def parse_optional_model(raw: object) -> str:
    """As `parse_model`, or "" for none."""
    return parse_model(raw) if raw != "" else ""


def make_integer_parser(low: int, high: int) -> Callable[[object], int]:
    return _make_number_parser(
        int, f"expected a whole number from {low} to {high}", lambda number: low <= number <= high
    )


def make_amount_parser(unit: str, low: float, high: float) -> Callable[[object], float]:
    problem = f"expected a number of {unit}, from {low:g} to {high:.15g}"
    return _make_number_parser(float, problem, lambda number: low <= number <= high)


def _make_number_parser(kind: type[N], problem: str, fits: Callable[[N], bool]) -> Callable[[object], N]:
    def parse(raw: object) -> N:
        if isinstance(raw, (kind, int, str)) and not isinstance(raw, bool):
            with suppress(ValueError, OverflowError):  # TOML's integers may be of any size
                if fits(number := kind(raw)):  # False for nan
                    return number
        raise ValueError(problem)

    return parse


def make_option_parser(parse: Callable[[object], N], refusal: Callable[[str], Exception]) -> Callable[[object], N]:
    """Parser of a command's own option: raises `refusal`, which names the option, with the value in the message."""

    def parse_option(raw: object) -> N:
        try:
            return parse(raw)
        except ValueError as error:
            raise refusal(f"{error}, not {raw!r}") from None

    return parse_option


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


def parse_days(raw: object) -> Value:
    """Number of days; "off" is 0."""
    try:
        return 0.0 if raw == OFF else make_amount_parser("days", 0, 36_500)(raw)
    except ValueError as error:
        raise ValueError(f"{error}, or {OFF}") from None


def parse_step_size(raw: object) -> Value:
    """Number of tokens, or `STEP_AUTO`: the backend measures the best one."""
    if raw == STEP_AUTO:
        return STEP_AUTO
    try:
        return make_integer_parser(1, STEP_TOKENS_MAX)(raw)
    except ValueError as error:
        raise ValueError(f"{error}, or {STEP_AUTO}") from None


def parse_rules(raw: object) -> str:
    """Names out of `STABILIZE_RULES`; "" for none."""
    problem = f"expected some of {', '.join(STABILIZE_RULES)}, separated by commas"
    return _parse_names(raw, problem, STABILIZE_RULES.__contains__)


def parse_origins(raw: object) -> str:
    """Origins as browsers send them, or "*" for any; "" for none."""
    problem = "expected origins such as https://app.example or http://localhost:3000, separated by commas, or *"
    return _parse_names(raw, problem, lambda name: name == "*" or bool(ORIGIN.fullmatch(name.lower())))


def parse_hosts(raw: object) -> str:
    """Host names or addresses without a port, or "*"; "" for none."""
    problem = "expected host names such as studio.example, separated by commas, or *"
    return _parse_names(raw, problem, lambda name: name == "*" or _is_host(name.lower())).lower()


def split_names(text: str) -> frozenset[str]:
    """Names of a list that `_parse_names` wrote, in lower case, without the dot that ends a full domain name."""
    return frozenset(name.lower().removesuffix(".") for name in text.split(",") if name)


def _is_host(name: str) -> bool:
    return bool(HOST_NAME.fullmatch(name.removesuffix("."))) or is_ip_address(name)


def _parse_names(raw: object, problem: str, fits: Callable[[str], bool]) -> str:
    """Names separated by commas, or a TOML array, as text separated by commas without repeats."""
    given = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError(problem)
    names = [name.strip() for name in given if name.strip()]
    if not all(map(fits, names)):
        raise ValueError(problem)
    return ",".join(dict.fromkeys(names))


def parse_json_object(raw: object) -> str:
    """JSON text of an object, from JSON text or a TOML table.  "{}" for an empty text."""
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


def make_table_list_parser(name: str, hint: str = "") -> Callable[[object], str]:
    """Parser to the JSON text of a list of objects, from JSON text or a TOML array of the tables `[[name]]`.

    Their keys are checked elsewhere: `settings.models`, `settings.prewarm`.  `hint` ends the message about bad JSON.
    """

    def parse(raw: object) -> str:
        try:
            given = json.loads(raw or "[]", parse_constant=_refuse_constant) if isinstance(raw, str) else raw
            if isinstance(given, list) and all(isinstance(each, dict) for each in given):
                return json.dumps(given, allow_nan=False, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"expected tables [[{name}]], or a JSON list of objects{hint}") from None
        raise ValueError(f"expected tables [[{name}]], or a JSON list of objects")

    return parse


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


parse_share = _make_number_parser(float, "expected a share, from 0 to 1", lambda number: 0 <= number <= 1)
parse_temperature = _make_number_parser(float, "expected a number, 0 or more", lambda number: 0 <= number < math.inf)
parse_port = make_integer_parser(1, 65535)
parse_model_list = make_table_list_parser("models", " (paths alone: --model, several times)")
parse_prewarm_list = make_table_list_parser("prewarm")
parse_gigabytes = make_amount_parser("gigabytes", 0, 1e6)
parse_seconds = make_amount_parser("seconds", 0, 1e9)
parse_positive_seconds = make_amount_parser("seconds", 0.001, 1e9)  # where none would be no limit, but no service


def strip_backticks(help_text: str) -> str:
    """Help line without Markdown, for a terminal."""
    return re.sub(r"`([^`]*)`", r"\1", help_text)
