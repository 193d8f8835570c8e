"""Flags of a process: an argparse parser made from the settings table."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from warmline_common.process.console import write_line
from warmline_common.settings.parsers import Value, strip_backticks
from warmline_common.settings.table import SETTINGS, list_settings

SHOWN_CHARS_MAX = 200  # of a value that is refused
Parsers = Mapping[str, Callable[[object], Value]]


class SettingError(ValueError):
    """A refused setting; the message is one line: the flag, its value and what was expected."""


class FlagParser(argparse.ArgumentParser):
    """Parser with a flag for each setting of a process.  A bad flag costs one line and exit code 2.

    `parsers` replace those of the table where a process accepts more than people may set.
    """

    def __init__(self, process: str, description: str, parsers: Parsers | None = None) -> None:
        super().__init__(prog=f"warmline {process}", description=description)
        self._process, self._parsers = process, parsers or {}
        for setting in list_settings(process):
            shown = strip_backticks(setting.help).replace("%", "%%")
            if setting.is_switch:
                self.add_argument(setting.flag, action="store_true", help=shown)
            else:
                self.add_argument(setting.flag, default=setting.default, metavar=setting.metavar, help=shown)

    def error(self, message: str) -> NoReturn:
        write_line(f"warmline {self._process}: {message}")
        raise SystemExit(2)

    def parse_values(self, arguments: Sequence[str] | None) -> dict[str, Any]:
        """Values by name: settings as the table parses them, other flags as argparse does.  Raises SettingError."""
        values = vars(self.parse_args(arguments))
        names = [setting.name for setting in list_settings(self._process)]
        return values | {name: check_setting(name, values[name], self._parsers) for name in names}


def check_setting(name: str, raw: object, parsers: Parsers | None = None) -> Any:
    """A setting's value, parsed.  Raises SettingError."""
    setting = SETTINGS[name]
    try:
        return (parsers or {}).get(name, setting.parse)(raw)
    except ValueError as error:
        label = setting.flag if setting.has_flag else setting.variable
        raise SettingError(f"{label}{'' if setting.secret else f' {str(raw)[:SHOWN_CHARS_MAX]}'}: {error}") from None
