"""Commands in messages act on the home that the message is about."""

import pytest

from warmline_common.settings.hints import add_home, format_command
from warmline_common.settings.table import get_default


@pytest.mark.parametrize(
    ("home", "option"),
    [("", ""), (get_default("home"), ""), ("/srv/warm", " --home /srv/warm"), ("/my home", " --home '/my home'")],
)
def test_command_names_home_unless_default(home: str, option: str) -> None:
    assert format_command("cachectl key show", home) == f"cachectl key show{option}"
    text = "start it (`warmline serve`), or see `cachectl stats`"
    assert add_home(text, home) == f"start it (`warmline serve{option}`), or see `cachectl stats{option}`"


@pytest.mark.parametrize(
    ("text", "completed"),
    [
        ("`cachectl purge --key 'no key'` deletes", "`cachectl purge --key 'no key' --home /h` deletes"),
        (
            "`cachectl gc --to-gb 2`, `warmline doctor`",
            "`cachectl gc --to-gb 2 --home /h`, `warmline doctor --home /h`",
        ),
        ("`cachectl ls --home /other` has its own", "`cachectl ls --home /other` has its own"),
        ("`warmline launchd logs` and `warmline service logs`", "`warmline launchd logs` and `warmline service logs`"),
        ("`cachectl` and `ls` are no commands to type", "`cachectl` and `ls` are no commands to type"),
        ("raise `disk_budget_gb`, or cachectl pin", "raise `disk_budget_gb`, or cachectl pin"),
    ],
)
def test_commands_in_backticks_get_home(text: str, completed: str) -> None:
    assert add_home(text, "/h") == completed
