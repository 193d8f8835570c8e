"""What the README says of the settings is what they are."""

import re
from pathlib import Path

from warmline_run.settings import SETTINGS

README = Path(__file__).parents[2] / "README.md"
SAID_IN_WORDS = {
    "home": "`~/.warmline`",
    "served_name": "the model's own",
    "client_key": "none",
    "adapter_path": "none",
    "stabilize": "none",
    "cors_origins": "none",
}


def test_the_settings_table_is_complete_and_right() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", README.read_text(), flags=re.MULTILINE))
    shown = {name: str(setting.default).lower().removesuffix(".0") for name, setting in SETTINGS.items()}
    assert rows == {name: SAID_IN_WORDS.get(name, f"`{default}`") for name, default in shown.items()}
