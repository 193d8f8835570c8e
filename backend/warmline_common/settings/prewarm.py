"""Prompts to compute ahead: entries of `[[prewarm]]` in HOME/warmline.toml, checked.  Pure."""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmline_common.settings.models import ModelConfig, find_model
from warmline_common.settings.parsers import make_choice_parser, parse_bool, parse_path

ENTRIES_MAX = 64
TEXT_CHARS_MAX = 1000
SHOWN_CHARS_MAX = 200  # of a value that is refused
API_NAMES = ("chat", "completions", "responses", "messages")
KEYS = ("file", "client", "api", "model", "key", "pin")
EXAMPLE = 'file = "prompts/day.json", or client = "claude-cli"'
parse_api = make_choice_parser(*API_NAMES)


@dataclass(frozen=True)
class PrewarmEntry:
    """A prompt to compute ahead: of a file with a request's body, or the head of a client's last prompts."""

    file: str = ""  # absolute, or relative to the home
    client: str = ""  # name of its key, or beginning of its User-Agent
    api: str = ""  # of the file's body; "": as the body shows
    model: str = ""  # configured name or alias; "": the default; not looked at where one model is served
    key: str = ""  # name of the client key for whose requests it is; "": requests without a key
    pin: bool = False

    @property
    def name(self) -> str:
        """Name in tables and messages, unlike any other entry's."""
        return " ".join(filter(None, (self.file or self.client, self.model, self.key)))


def parse_prewarm(raw: str) -> list[PrewarmEntry]:
    """Entries of the setting `prewarm`.  Raises ValueError, which names entry and key."""
    tables: list[dict[str, Any]] = json.loads(raw)
    if len(tables) > ENTRIES_MAX:
        raise ValueError(f"expected {ENTRIES_MAX} entries at most, not {len(tables)}")
    entries = [_parse_entry(table, f"entry {number}") for number, table in enumerate(tables, start=1)]
    names = [entry.name for entry in entries]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{repeated!r} is given twice: remove one of its tables [[prewarm]]")
    return entries


def check_prewarm_models(entries: Sequence[PrewarmEntry], models: Sequence[ModelConfig]) -> None:
    """Raise ValueError for an entry whose model is none of several; where one is served, any name means that."""
    for entry in entries:
        if models and entry.model and find_model(models, entry.model) is None:
            names = ", ".join(model.name for model in models)
            raise ValueError(f"{entry.file or entry.client}: unknown model {entry.model!r}; expected one of {names}")


def _parse_entry(table: Mapping[str, Any], label: str) -> PrewarmEntry:
    for key in table:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(KEYS)}"
            raise ValueError(f"{label}: unknown key {key!r}; {hint}")
    if ("file" in table) == ("client" in table):
        raise ValueError(f"{label}: expected either a file or a client, as in {EXAMPLE}")
    if "api" in table and "client" in table:
        raise ValueError(f"{label}: expected `api` with a file only: a client's API is that of its requests")
    values = {}
    for key, raw in table.items():
        try:
            values[key] = PARSERS.get(key, _parse_text)(raw)
        except ValueError as error:
            raise ValueError(f"{label}: {key}: {error}, not {str(raw)[:SHOWN_CHARS_MAX]!r}") from None
    return PrewarmEntry(**values)


def _parse_text(raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip() or not raw.isprintable() or len(raw) > TEXT_CHARS_MAX:
        raise ValueError("expected text that can be printed")
    return raw.strip()


PARSERS: Mapping[str, Callable[[object], Any]] = {
    "file": lambda raw: parse_path(_parse_text(raw)),
    "api": parse_api,
    "pin": parse_bool,
}
