"""Advice in messages for people; commands of ours in it act on the home that the message is about.  Pure."""

import re
import shlex
from pathlib import Path

from warmline_common.settings.table import get_default

FOLDER_ADVICE = "give a model's folder, or a repository's name as owner/model"
_QUOTED_COMMAND = re.compile(r"`((?:cachectl|warmline) (?!launchd|service)\w+(?: (?!--home)[^`\s]+)*)`")


def format_command(command: str, home: Path | str) -> str:
    """A command as it is typed for a home: with `--home` where that is not the default one ("" is)."""
    if str(home) in ("", get_default("home")):
        return command
    return f"{command} --home {shlex.quote(str(home))}"


def add_home(text: str, home: Path | str) -> str:
    """Text whose commands of ours, in backticks, are as `format_command` writes them."""
    return _QUOTED_COMMAND.sub(lambda found: f"`{format_command(found[1], home)}`", text)
